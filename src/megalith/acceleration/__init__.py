"""Activation recomputation, and replay of recorded torch calls."""
