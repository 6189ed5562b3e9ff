"""Queries with a relevant passage and hard negatives: the training data of text-embedding models."""
