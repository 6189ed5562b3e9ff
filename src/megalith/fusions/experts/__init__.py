"""Moving tokens to experts and back: row map, permutation, padding, and the matrix products of all experts."""
