"""Bias, dropout and residual addition."""
