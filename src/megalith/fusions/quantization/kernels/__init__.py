"""Triton kernels, their launchers and their operators; imported lazily, when a path needs them."""

import megalith.fusions.core.kernels  # noqa: F401  says how to install triton before a kernel file fails to import it
