"""Quantization to fp8, mxfp8 and nvfp4."""
