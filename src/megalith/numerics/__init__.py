"""Randomness as a function of global indices, and the tolerance by which two layouts are held equal."""
