"""Masked softmax of attention scores."""
