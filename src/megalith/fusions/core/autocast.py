"""Disables autocast inside an operation: the dtype of its matrix products depends on its operands only."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["without_autocast"]


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context in which matrix products on the device of ``x`` use the dtype of their operands."""
    # torch has no autocast for meta tensors
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
