"""Tensor and sequence parallelism: regions, layers, and the vocabulary-parallel loss."""
