"""The one list of operations."""

from benchmarks.fusions.operation import Operation
from benchmarks.fusions.operations import activations, residuals, rotary

__all__ = ["OPERATIONS"]

_FAMILIES = (activations, residuals, rotary)
OPERATIONS: dict[str, Operation] = {
    operation.name: operation for family in _FAMILIES for operation in family.OPERATIONS
}
