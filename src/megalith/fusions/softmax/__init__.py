"""Softmax of attention scores, masked."""
