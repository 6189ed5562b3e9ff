"""Data: indexed files, tokenizers, samples computed from their index. Depends on a rank and a world size only."""
