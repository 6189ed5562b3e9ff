"""Rotary position embedding, including that of multi-latent attention, and its tables."""
