"""Makes the GPU of a function's tensors the current one: Triton launches on the current GPU, whatever it is given."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["on_the_device_of_its_tensors"]

Y = TypeVar("Y")


def on_the_device_of_its_tensors(function: Callable[..., Y]) -> Callable[..., Y]:
    """``function`` of positional operands, run with the GPU of its first tensor as the current one.

    Where that is the current one already, as in every process that has one GPU, the price is one comparison.
    """

    @functools.wraps(function)  # torch's search for kernels unwraps it
    def on_device(*inputs: object) -> Y:
        device = _another_device(inputs)
        if device is None:
            return function(*inputs)
        with torch.cuda.device(device):
            return function(*inputs)

    return on_device


def _another_device(inputs: tuple[object, ...]) -> torch.device | None:
    """The GPU of the first tensor of ``inputs``, which may stand in a list, unless it is the current one."""
    for x in inputs:
        first = x[0] if isinstance(x, list) and x else x
        if isinstance(first, Tensor):
            # before CUDA is initialized there are fake tensors on GPUs only, of which nothing is launched
            if (
                not first.is_cuda
                or not torch.cuda.is_initialized()
                or first.get_device() == torch.cuda.current_device()
            ):
                return None
            return first.device
    return None
