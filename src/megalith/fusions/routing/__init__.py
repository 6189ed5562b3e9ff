"""What a router computes: scores, the choice of experts, dense maps and indices."""
