"""Megalith trains transformer models too large for one device, on anything from a laptop CPU to a GPU cluster."""

__version__ = "0.1.0"
