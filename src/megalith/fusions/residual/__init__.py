"""Bias, dropout and residual."""
