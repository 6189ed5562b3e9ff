"""Megalith trains transformer models that do not fit one device, on a laptop CPU and on a GPU cluster alike."""

__version__ = "0.1.0"
