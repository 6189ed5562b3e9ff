"""Kernels launched where there is no GPU: compiled for an H100, then dropped, so that only the host's work is timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megalith.optional import has_triton, triton_interprets

__all__ = ["can_launch_nowhere", "launching_nowhere"]

_CAPABILITY, _WARP = 90, 32
_SHARED_MEMORY = 227 << 10  # bytes per program


def can_launch_nowhere() -> bool:
    """Returns whether Triton compiles kernels rather than interpreting them, and there is no GPU to launch them on.

    What is compiled here stays in Triton's cache of kernels, and would not be launched on a GPU either.
    """
    return has_triton() and not triton_interprets() and not torch.cuda.is_available()


@contextmanager
def launching_nowhere() -> Iterator[None]:
    """Inside the block, Triton compiles for an H100 and launches nothing; tensors may be on the CPU.

    A launch costs the host what Triton's own does, less its launcher in C, which reads the arguments and calls CUDA.
    """
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver())
    try:
        yield
    finally:
        driver._active = before


class _Utilities:
    """Stands for a loaded binary and a device's properties."""

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024  # module, function, registers, spilled bytes, threads per program at most

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_MEMORY}


class _Launcher:
    """What Triton calls with a grid, a stream, a function and the arguments."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *_: object) -> None:
        pass


class _Driver:
    """As much of Triton's driver as a launch asks for."""

    utils = _Utilities()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _CAPABILITY, _WARP)
