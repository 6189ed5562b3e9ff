"""Refuses tensors that do not fit an operation, before any kernel starts: what was wanted, given, and where."""

from collections.abc import Sequence

from torch import Tensor

from megalith.errors import ShapeError

__all__ = ["check_floating", "check_one_device", "check_shape"]


def check_floating(**tensors: Tensor | None) -> None:
    """Raises ShapeError unless each tensor given is floating, of 16 bits or more; names are those of the arguments."""
    for name, x in tensors.items():
        if x is not None and not (x.is_floating_point() and x.element_size() > 1):
            raise ShapeError(f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}")


def check_one_device(**tensors: Tensor | None) -> None:
    """Raises ShapeError unless all tensors given are on one device."""
    given = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(given.values())) > 1:
        where = ", ".join(f"{name} is on {device}" for name, device in given.items())
        raise ShapeError(f"{' and '.join(given)} must be on one device; {where}")


def check_shape(name: str, x: Tensor | None, shape: Sequence[int], because: str) -> None:
    """Raises ShapeError unless ``x`` is None or of ``shape``; ``because`` says what the shape follows from."""
    if x is not None and list(x.shape) != list(shape):
        raise ShapeError(f"{name} must be {list(shape)}, {because}; got {list(x.shape)}")
