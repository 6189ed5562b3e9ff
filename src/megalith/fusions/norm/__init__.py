"""LayerNorm and RMSNorm, alone and of a sum with a residual."""
