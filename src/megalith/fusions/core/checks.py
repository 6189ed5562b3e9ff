"""Checks the operands of an operation before any kernel starts; errors state what was expected and given, and where."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import ShapeError

__all__ = ["check_bool", "check_floating", "check_indices", "check_one_device", "check_rows", "check_shape"]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_bool(**tensors: Tensor) -> None:
    """Raises ShapeError unless all given tensors are bool."""
    for name, x in tensors.items():
        if x.dtype != torch.bool:
            raise ShapeError(f"{name} must be bool; got {x.dtype}")


def check_floating(**tensors: Tensor | None) -> None:
    """Raises ShapeError unless all given tensors are floating point of 16 bits or more; keywords are argument names."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in _FLOATING:
            raise ShapeError(f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}")


def check_indices(**tensors: Tensor) -> None:
    """Raises ShapeError unless all given tensors are int32 or int64."""
    for name, x in tensors.items():
        if x.dtype not in (torch.int32, torch.int64):
            raise ShapeError(f"{name} must be int32 or int64; got {x.dtype}")


def check_one_device(**tensors: Tensor | None) -> None:
    """Raises ShapeError unless all given tensors are on one device."""
    if len({x.device for x in tensors.values() if x is not None}) > 1:
        given = {name: x.device for name, x in tensors.items() if x is not None}
        *others, last = given
        where = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise ShapeError(f"{', '.join(others)} and {last} must be on one device; got {where}")


def check_rows(name: str, x: Tensor, size: str) -> None:
    """Raises ShapeError unless ``x`` has a last dimension, named ``size`` as in docs/shapes.md."""
    if x.dim() == 0:
        raise ShapeError(f"{name} must be [..., {size}]; got a tensor without dimensions")


def check_shape(name: str, x: Tensor | None, shape: Sequence[int], because: str) -> None:
    """Raises ShapeError unless ``x`` is None or has ``shape``; ``because`` says what determines the shape."""
    if x is not None and x.shape != tuple(shape):
        raise ShapeError(f"{name} must be {list(shape)}, {because}; got {list(x.shape)}")
