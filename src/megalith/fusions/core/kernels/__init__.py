"""Triton functions that several families call. Files outside of a folder ``kernels`` import inside a function."""

from megalith.optional import need

need("triton")  # the one line of code in an __init__: it says how to get triton before a kernel file fails for it
