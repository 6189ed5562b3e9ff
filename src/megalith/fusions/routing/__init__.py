"""MoE routing: scores, top-k choice of experts, and conversion between dense maps and indices."""
