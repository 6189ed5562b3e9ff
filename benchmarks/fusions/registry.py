"""The one list of operations."""

from benchmarks.fusions.operation import Operation
from benchmarks.fusions.operations import (
    activations,
    attention,
    casts,
    experts,
    losses,
    norms,
    residuals,
    rotary,
    routing,
)

__all__ = ["FAMILIES", "OPERATIONS"]

FAMILIES = (activations, residuals, norms, rotary, attention, losses, routing, experts, casts)
OPERATIONS: dict[str, Operation] = {operation.name: operation for family in FAMILIES for operation in family.OPERATIONS}
