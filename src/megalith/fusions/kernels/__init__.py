"""Triton kernels, their launchers and their operators. Files outside this folder import from it inside a function."""

from megalith.optional import need

need("triton")  # the one line of code in an __init__: it says how to get triton before a kernel file fails for it
