"""LayerNorm and RMSNorm, optionally fused with the addition of a residual."""
