"""The pieces of a transformer: normalisation, rotary positions, attention, mlp, layer, stack, embeddings."""
