"""Triton kernels, their launchers and their operators; imported inside a function, when a path needs them."""

import megalith.fusions.core.kernels  # noqa: F401  says how to get triton before a kernel file fails for it
