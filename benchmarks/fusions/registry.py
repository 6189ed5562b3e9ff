"""All operations: those of every file in ``operations/``."""

import importlib
import pkgutil

from benchmarks.fusions import operations
from benchmarks.fusions.operation import Operation

__all__ = ["FAMILIES", "OPERATIONS"]

FAMILIES = tuple(
    importlib.import_module(f"{operations.__name__}.{module.name}")
    for module in pkgutil.iter_modules(operations.__path__)
)
OPERATIONS: dict[str, Operation] = {operation.name: operation for family in FAMILIES for operation in family.OPERATIONS}
