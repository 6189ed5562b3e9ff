"""Triton functions shared by several families. Files outside a ``kernels`` folder import them inside a function."""

from megalith.optional import need

need("triton")  # the only code in an __init__: says how to install triton before a kernel file fails to import it
