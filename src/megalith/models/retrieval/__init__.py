"""Exact retrieval: passages and their embeddings in a folder, and the search for those closest to a query."""
