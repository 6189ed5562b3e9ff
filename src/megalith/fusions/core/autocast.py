"""Keeps autocast outside of an operation: what its products are computed in follows from its operands alone."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["without_autocast"]


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """While it lasts, products on the device of ``x`` have the dtype of their operands."""
    # torch has no autocast for meta tensors
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
