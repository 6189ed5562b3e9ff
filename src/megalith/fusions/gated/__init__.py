"""Gated linear units: SwiGLU, GEGLU, quick GEGLU and ReGLU; optionally with the input saved in 8 bits."""
