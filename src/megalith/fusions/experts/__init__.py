"""Tokens at their experts: the row map, the copies there and back, padding, and the matrix products of all experts."""
