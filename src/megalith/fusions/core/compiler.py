"""Whether torch.compile can build for the CPU of this machine: asked by building, once in a process."""

import functools
import logging
import os
import shutil
import sys
from contextlib import suppress

import torch

from megalith.torch_compat import compile_apart, compiler_is_watched, trusting_vector_instructions

__all__ = ["why_no_compiler", "why_not_compile"]

log = logging.getLogger(__name__)


def why_no_compiler() -> str | None:
    """Why torch.compile has no C++ compiler to build with, in one clause; None where there is one."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1 turns torch.compile off"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if not shutil.which(compiler):
        return f"torch.compile finds no C++ compiler (install {compiler}, or set CXX)"
    return None


@functools.cache
def why_not_compile() -> str | None:
    """Why torch.compile cannot build for the CPU, in one clause; None where it has just built a loop.

    A compiler alone is not enough: headers of Python, or OpenMP, may be missing too.
    """
    if reason := why_no_compiler():
        return reason
    if not compiler_is_watched():  # by who tells of it
        log.warning(
            "compiling fused operations for this CPU as they are first called, seconds each; torch's cache keeps them "
            "for later runs (use('blocked') or TORCH_COMPILE_DISABLE=1 does without)"
        )
    try:
        _build()
    except Exception as error:  # of dynamo, of Inductor, of the compiler, of the file system
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch.compile cannot build here ({lines[0]})"
    return None


def _build() -> None:
    """Builds and runs a loop; with the vector instructions that this CPU has, or with those that torch finds to work.

    The loop shows at once what torch would find out by builds of its own: that compiler and library know them.
    """
    with suppress(Exception):  # an old compiler, and a new CPU
        with trusting_vector_instructions():
            compile_apart(_probe)(torch.zeros(64))
        return
    compile_apart(_probe)(torch.zeros(64))


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1.0
