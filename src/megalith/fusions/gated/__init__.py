"""Gated linear units: SwiGLU, GEGLU, quick GEGLU and ReGLU; with the input kept in 8 bits."""
