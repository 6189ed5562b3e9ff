"""What can be known about kernels without a GPU: the bytes they move, and the resources they need on each target."""

import atexit
import functools
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import triton
from torch import Tensor
from triton._utils import type_canonicalisation_dict
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpreterBuilder
from triton.runtime.jit import JITFunction

from megalith.fusions.core import dispatch as backend
from megalith.optional import triton_interprets

T = TypeVar("T")

in_interpreter = pytest.mark.skipif(not triton_interprets(), reason="shown in Triton's interpreter, off on a GPU")

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Traffic(NamedTuple):
    """Bytes at distinct addresses read and written, and the most reads or writes of any one address."""

    bytes: int
    visits: int


class Resources(NamedTuple):
    """The resources one kernel needs on one target."""

    registers: int  # per thread
    spilled: int  # per thread: bytes on NVIDIA, registers on AMD
    shared: int  # bytes per program


def traffic(run: Callable[[], object], shared: Sequence[Tensor] = ()) -> Traffic:
    """What interpreted kernels load and store in ``run()``; masked lanes move nothing.

    Addresses in ``shared`` tensors, and scalars, count towards the bytes, but every program may access them.
    """
    touched: dict[tuple[str, int, bool], list[np.ndarray]] = {}

    def recording(kind: str, method: Any, mask_index: int) -> Any:
        def recorded(self: Any, pointers: Any, *args: Any) -> Any:
            mask = np.broadcast_to(args[mask_index].data, pointers.data.shape).astype(bool)
            size = pointers.get_element_ty().primitive_bitwidth // 8
            touched.setdefault((kind, size, pointers.data.size == 1), []).append(pointers.data[mask])
            return method(self, pointers, *args)

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        for name, mask_index in (("create_masked_load", 0), ("create_masked_store", 1)):
            patch.setattr(InterpreterBuilder, name, recording(name, getattr(InterpreterBuilder, name), mask_index))
        run()
    moved, busiest = 0, 0
    for (_, size, are_scalars), parts in touched.items():
        addresses, visits = np.unique(np.concatenate(parts), return_counts=True)
        moved += size * len(addresses)
        for x in shared:
            visits[(addresses >= x.data_ptr()) & (addresses < x.data_ptr() + x.nbytes)] = 0
        busiest = busiest if are_scalars else max(busiest, visits.max(initial=0))
    return Traffic(moved, int(busiest))


def without_interpreter(function: Callable[..., T], *args: object) -> T:
    """Runs ``function(*args)`` in a process without the interpreter; the function is passed by name.

    The process takes seconds to start, so it is kept: a function must restore what it changes there.
    """
    try:
        return _process_without_interpreter().submit(function, *args).result()
    except BrokenProcessPool:  # the process died; the next call starts another
        _process_without_interpreter.cache_clear()
        raise


@functools.cache
def _process_without_interpreter() -> ProcessPoolExecutor:
    cache = TemporaryDirectory(prefix="triton-")
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", cache.name)
        pool.submit(os.getpid).result()  # the first call starts the process, which inherits this environment
    atexit.register(cache.cleanup)
    atexit.register(pool.shutdown)  # runs before the cleanup
    return pool


class Signature(NamedTuple):
    """All of the arguments that compilation depends on."""

    types: dict[str, str]
    constants: dict[tuple[int], Any]
    aligned: dict[tuple[int], list[list[Any]]]
    options: dict[str, int]


class Launch(NamedTuple):
    """A kernel and the arguments that it was launched with."""

    kernel: Any
    arguments: dict[str, Any]

    def signature(self) -> Signature:
        names = self.kernel.arg_names
        values = [self.arguments.get(name) for name in names]
        constant = [p.is_constexpr or value is None for p, value in zip(self.kernel.params, values, strict=True)]
        types = ["constexpr" if constant[i] else _type(value) for i, value in enumerate(values)]
        # what a launch infers for aligned memory and sizes divisible by 16; without it, loads are narrow
        at = [i for i, value in enumerate(values) if not constant[i] and _aligned(value)]
        return Signature(
            types=dict(zip(names, types, strict=True)),
            constants={(i,): value for i, value in enumerate(values) if constant[i]},
            aligned={(i,): [["tt.divisibility", 16]] for i in at},
            options={name: self.arguments[name] for name in ("num_warps", "num_stages") if name in self.arguments},
        )


def launches(run: Callable[[], object]) -> list[Launch]:
    """The launches ``run()`` would make; none is made, so its results are garbage. Only without the interpreter."""
    recorded: list[Launch] = []

    def recorder(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = dict(zip(kernel.arg_names, args, strict=False))
            recorded.append(Launch(kernel, names | kwargs))

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", recorder)
        patch.setattr(backend, "triton_interprets", lambda: True)  # accepts CPU tensors
        run()
    return recorded


def compile_for(launch: Launch, target: GPUTarget) -> Resources:
    """The resources of the kernel, compiled for ``target`` as a launch with these arguments would compile it."""
    compiled = _compiled(launch, target)
    return _resources(compiled.asm, compiled.metadata.shared)


def widest_load(launch: Launch, target: GPUTarget) -> int:
    """Bytes that the kernel's widest load moves from global memory to one thread; ``target`` is an NVIDIA GPU."""
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx(launch, target))
    return max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def ptx(launch: Launch, target: GPUTarget) -> str:
    """The kernel as PTX."""
    text: str = _compiled(launch, target).asm["ptx"]
    return text


def _compiled(launch: Launch, target: GPUTarget) -> Any:
    if "NATIVE" in launch.arguments:  # answers the launchers' queries of the missing GPU
        native = target.backend == "cuda" and target.arch >= 89
        launch = launch._replace(arguments=launch.arguments | {"NATIVE": native})
    signature = launch.signature()
    source = ASTSource(launch.kernel, signature.types, signature.constants, signature.aligned)
    return triton.compile(source, target=target, options=signature.options)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _aligned(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(asm: Any, shared: int) -> Resources:
    if "amdgcn" in asm:
        count = {key: int(n) for key, n in re.findall(r"\.(\w+_count): +(\d+)", asm["amdgcn"])}
        return Resources(count["vgpr_count"], count["vgpr_spill_count"] + count["sgpr_spill_count"], shared)
    with TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", usage)}
    return Resources(count["REG"], count["STACK"] + count["LOCAL"], shared)
