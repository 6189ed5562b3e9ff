"""Randomness as a function of global indices, and the tolerances for comparing two layouts."""
