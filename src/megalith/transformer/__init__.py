"""The building blocks of transformers: norms, rotary positions, attention, MLP, experts, layer, stack, embeddings."""
