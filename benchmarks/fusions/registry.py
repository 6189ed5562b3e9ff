"""The one list of operations."""

from benchmarks.fusions.operation import Operation
from benchmarks.fusions.operations import activations

__all__ = ["OPERATIONS"]

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (*activations.OPERATIONS,)}
