"""Rotary positions, also of multi-latent attention, and their tables."""
