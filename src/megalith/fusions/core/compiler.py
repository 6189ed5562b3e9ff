"""Whether torch.compile can build for this machine's CPU, determined once per process by a loop of its own."""

import functools
import os
import shutil
import sys
from contextlib import suppress

import torch

from megalith.fusions.core.compiled_formulas import CompiledFormula
from megalith.torch_compat.compiler import trusting_vector_instructions

__all__ = ["cpp_compiler", "why_no_compiler", "why_not_compile"]


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile calls."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def why_no_compiler() -> str | None:
    """Why torch.compile has no C++ compiler to build with, in one clause; None if it has one."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1 turns torch.compile off"
    if not shutil.which(cpp_compiler()):
        return f"torch.compile finds no C++ compiler (install {cpp_compiler()}, or set CXX)"
    return None


@functools.cache
def why_not_compile() -> str | None:
    """Why torch.compile cannot build for the CPU, in one clause; None if a loop runs, built now or by an earlier run.

    Having a compiler is not enough: Python's headers or OpenMP may be missing too.
    """
    if reason := why_no_compiler():
        return reason
    try:
        _build()
    except Exception as error:  # from dynamo, Inductor, the compiler or the file system
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch.compile cannot build here ({lines[0]})"
    return None


def _build() -> None:
    """Builds and runs a loop with this CPU's vector instructions, falling back to those that torch's own check accepts.

    torch finds out by separate builds whether compiler and library support them; building the loop shows it directly.
    """
    with suppress(Exception):  # an old compiler with a new CPU
        with trusting_vector_instructions():
            CompiledFormula(_probe)(torch.zeros(64))
        return
    CompiledFormula(_probe)(torch.zeros(64))


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1.0
