"""Activations without a gate: GELU with a bias, squared ReLU with a weight per token."""
