"""The one list of operations."""

from benchmarks.fusions.operation import Operation
from benchmarks.fusions.operations import activations, attention, losses, norms, residuals, rotary, routing

__all__ = ["OPERATIONS"]

_FAMILIES = (activations, residuals, norms, rotary, attention, losses, routing)
OPERATIONS: dict[str, Operation] = {
    operation.name: operation for family in _FAMILIES for operation in family.OPERATIONS
}
