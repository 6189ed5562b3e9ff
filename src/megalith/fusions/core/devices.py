"""GPU queries for launchers: make the tensors' GPU current, since Triton launches there, and read its properties."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["has_large_memory", "is_hopper", "on_the_device_of_its_tensors"]

Y = TypeVar("Y")
_LARGE_MEMORY = 227 << 10  # bytes
_HOPPER = (9, 0)


def on_the_device_of_its_tensors(function: Callable[..., Y]) -> Callable[..., Y]:
    """``function`` of positional operands, run with the GPU of its first tensor as the current device.

    If it is current already, as in every process with a single GPU, the cost is one comparison.
    """

    @functools.wraps(function)  # so that torch's search for kernels can unwrap it
    def on_device(*inputs: object) -> Y:
        for x in inputs:
            first = x[0] if isinstance(x, list) and x else x
            if isinstance(first, Tensor):
                if first.is_cuda and _is_on_another_gpu(first):
                    with torch.cuda.device(first.device):
                        return function(*inputs)
                break
        return function(*inputs)

    return on_device


def _is_on_another_gpu(x: Tensor) -> bool:
    """Whether the GPU of ``x`` is not the current one; before CUDA is initialized, GPU tensors can only be fake."""
    return torch.cuda.is_initialized() and x.get_device() != torch.cuda.current_device()


def has_large_memory(x: Tensor) -> bool:
    """Whether a program on the GPU of ``x`` may use 227 KiB of shared memory, as on an H100."""
    if not x.is_cuda or torch.version.hip is not None or not torch.cuda.is_initialized():
        return False
    properties: Any = torch.cuda.get_device_properties(x.device)  # torch's stubs leave out some of them
    return bool(properties.shared_memory_per_block_optin >= _LARGE_MEMORY)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile cannot trace these queries
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` is an NVIDIA GPU with compute capability 9.0, such as an H100 or H200.

    Before CUDA is initialized no device is: GPU tensors can only be fake then.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_initialized():
        return False
    return torch.cuda.get_device_capability(device) == _HOPPER
