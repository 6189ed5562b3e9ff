"""What this machine can train with: versions, devices, compiled operations, ranks, disk and optional packages.

Each check does on a small scale what a run does: it calls fused operations forward and backward on the path that a run
takes, starts ranks that exchange tensors, and writes a file durably.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalith import optional
from megalith.errors import MegalithError, StorageError
from megalith.fusions import (
    Backend,
    fused_attention,
    fused_rms_norm,
    fused_vocab_parallel_cross_entropy,
    glu,
    grouped_matmul,
)
from megalith.fusions.core.compiler import why_no_compiler, why_not_compile
from megalith.numerics.tolerance import gradient_error
from megalith.observe.energy_sources import why_no_energy
from megalith.observe.machine import describe_machine
from megalith.observe.units import duration, gibibytes, quantity
from megalith.resilience.call_ranks import call_ranks
from megalith.storage import LocalStore, explained
from megalith.training.process_group import choose_device, process_group
from megalith.wording import counted

__all__ = ["Finding", "examine"]

_TESTED = ((2, 11), (2, 13))  # the first and the last version of torch
_TOLERANCE = 0.01  # relative error of a whole tensor; bfloat16 rounds by up to 0.004
_NUM_BYTES = 1 << 26  # that ranks add up, and that are written to the disk
_LEAST_SHM = 1 << 30  # bytes of /dev/shm; NCCL takes some 10 MB for each pair of GPUs that have no direct connection
_STALL = 60.0  # seconds after which ranks that make no progress are given up on


@dataclass(frozen=True)
class Finding:
    """What one check found. ``state``: ok; off: a part is missing that runs do not need; failed: it does not work."""

    state: Literal["ok", "off", "failed"]
    name: str
    text: str


def examine(num_ranks: int | None, folder: Path, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Yields what is found on this machine, check by check.

    Args:
        num_ranks: how many ranks to start; None: as many as there are GPUs, without GPUs two.
        folder: where runs will be written. It gets a temporary file of 64 MiB.
        progress: receives what is being checked.
    """
    facts = describe_machine()
    versions = [f"{name} {facts[name]}" for name in ("python", "megalith", "numpy") if name in facts]
    machine = [facts[name] for name in ("processor", "system") if name in facts]
    memory = f", {facts['memory']} of memory" if "memory" in facts else ""
    yield Finding("ok", "machine", f"{', '.join(machine)}, {counted(int(facts['cores']), 'core')}{memory}")
    yield Finding("ok", "versions", ", ".join(versions))
    yield _torch()
    yield from _devices()
    device = choose_device()
    for name, check in (
        ("compiler", lambda: _compiler(device)),
        ("operations", lambda: _operations(device)),
        ("ranks", lambda: _ranks(device, num_ranks)),
        ("disk", lambda: _disk(folder)),
    ):
        progress(f"checking {name}")
        yield from _attempted(name, (run() for run in [check]))
    yield from _attempted("packages", _missing(device))


def _attempted(name: str, found: Iterable[Finding]) -> Iterator[Finding]:
    """Yields ``found``; an error on the way becomes a failure of the part ``name``."""
    try:
        yield from found
    except Exception as error:  # whatever a driver, a compiler or a disk may raise
        what = "" if isinstance(error, MegalithError) else f"{type(error).__name__}: "
        yield Finding("failed", name, f"{what}{error}")


def _torch() -> Finding:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    first, last = (".".join(map(str, version)) for version in _TESTED)
    if _TESTED[0] <= (major, minor) <= _TESTED[1]:
        return Finding("ok", "torch", f"{torch.__version__}, of the tested versions {first} to {last}")
    return Finding("off", "torch", f"{torch.__version__} is not tested; use {first} to {last} if something fails")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("off", "gpu", f"none: runs use the CPU, and ranks communicate over gloo; {_why_no_gpu()}")
        return
    for number in range(torch.cuda.device_count()):
        yield from _attempted(f"gpu {number}", _gpu(number))
    shm = Path("/dev/shm")
    if torch.cuda.device_count() > 1 and shm.exists() and (size := shutil.disk_usage(shm).total) < _LEAST_SHM:
        yield Finding(
            "failed",
            "shared memory",
            f"/dev/shm has {quantity(size)}B, with which NCCL may fail between GPUs; start the container with "
            "--shm-size=1g or --ipc=host",
        )


def _gpu(number: int) -> Iterator[Finding]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    taken = f", {gibibytes(total - free)} of it in use" if total - free > 1 << 30 else ""
    kind = f"compute capability {properties.major}.{properties.minor}"
    yield Finding("ok", f"gpu {number}", f"{properties.name}, {gibibytes(total)}{taken}, {kind}")


def _why_no_gpu() -> str:
    """Why torch finds no GPU, in a clause: a driver that is missing or too old looks like a machine without one."""
    if not (torch.version.cuda or torch.version.hip):
        return "this build of torch is for CPUs only"
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, or whatever the driver's library raises
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "torch does not say why"


def _compiler(device: torch.device) -> Finding:
    """Builds and runs a loop: to find a compiler is not enough, because headers or libraries may be missing."""
    if device.type != "cpu":
        if optional.has_triton():
            return Finding("ok", "compiler", "Triton compiles the kernels")
        needed = "triton is not installed, so kernels cannot run: pip install 'megalith[triton]'"
        return Finding("failed", "compiler", needed)
    slower = "fused operations run slower, uncompiled"
    if (reason := why_no_compiler()) is not None:
        return Finding("off", "compiler", f"{reason}; {slower}")
    if (reason := why_not_compile()) is not None:
        return Finding("failed", "compiler", f"{reason}; {slower}")
    return Finding("ok", "compiler", "a C++ compiler builds fused operations for CPUs")


def _operations(device: torch.device) -> Finding:
    """Compares fused operations on their default paths, forward and backward in bfloat16, with the references."""
    started, wrong = perf_counter(), []
    for name, (call, shapes) in _CALLED.items():
        operands = [
            torch.randn(shape, generator=torch.Generator().manual_seed(number)).bfloat16()
            for number, shape in enumerate(shapes)
        ]
        found = _with_gradients(call, [operand.to(device) for operand in operands], None)
        want = _with_gradients(call, [operand.double() for operand in operands], "reference")
        error = max(gradient_error(got.cpu(), exact, 0.0) for got, exact in zip(found, want, strict=True))
        if not error < _TOLERANCE:  # NaN is also wrong
            wrong.append(f"{name} differs from its reference by {error:.1%}")
    if wrong:
        return Finding("failed", "operations", "; ".join(wrong))
    took = duration(perf_counter() - started)
    names = ", ".join(_CALLED)
    return Finding("ok", "operations", f"{names} match their references in bfloat16; {took} with first calls")


def _with_gradients(call: Callable[..., Tensor], operands: list[Tensor], backend: Backend | None) -> list[Tensor]:
    """Returns the output and the gradients of its operands."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    output = call(*leaves, backend=backend)
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).view(output.shape)
    output.backward(weights.to(output))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _attention(q: Tensor, k: Tensor, v: Tensor, backend: Backend | None) -> Tensor:
    return fused_attention(q, k, v, backend=backend)[0]


def _cross_entropy(logits: Tensor, backend: Backend | None) -> Tensor:
    labels = torch.arange(logits.shape[0], device=logits.device).unsqueeze(1) * 37 % logits.shape[-1]
    return fused_vocab_parallel_cross_entropy(logits, labels, backend=backend)


def _experts(x: Tensor, weight: Tensor, backend: Backend | None) -> Tensor:
    num_experts = weight.shape[0]
    rows = torch.full((num_experts,), x.shape[0] // num_experts, dtype=torch.int32, device=x.device)
    return grouped_matmul(x, weight, rows, backend=backend)


# name: the call, and the shapes of its operands
_CALLED: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "norm": (fused_rms_norm, [(512, 1024), (1024,)]),
    "glu": (lambda x, backend: glu(x, activation="silu", backend=backend), [(512, 2048)]),
    "attention": (_attention, [(256, 1, 8, 64), (256, 1, 4, 64), (256, 1, 4, 64)]),
    "cross entropy": (_cross_entropy, [(512, 1, 4096)]),
    "experts": (_experts, [(512, 256), (4, 128, 256)]),
}


def _ranks(device: torch.device, num_ranks: int | None) -> Finding:
    """Starts ranks that add up a tensor over all of them."""
    if num_ranks is None:
        num_ranks = 2 if device.type == "cpu" else torch.cuda.device_count()
    if device.type == "cuda" and num_ranks == 1:
        return Finding("ok", "ranks", "one rank exchanges nothing")
    started = perf_counter()
    seconds = max(call_ranks(num_ranks, _exchange, _NUM_BYTES // 4, stall_seconds=_STALL))
    took, backend = duration(perf_counter() - started), "gloo" if device.type == "cpu" else "NCCL"
    told = f"{counted(num_ranks, 'rank')} started in {took} and added up {_NUM_BYTES >> 20} MiB over {backend}"
    return Finding("ok", "ranks", f"{told} at {quantity(_NUM_BYTES / seconds)}B/s")


def _exchange(num_elements: int) -> float:
    """On a rank: returns the seconds of a summation over all ranks, the second one."""
    device = choose_device()
    with process_group(device):
        size, seconds = dist.get_world_size(), 0.0
        for _ in range(2):
            x = torch.full((num_elements,), float(dist.get_rank() + 1), device=device)
            dist.barrier()
            started = perf_counter()
            dist.all_reduce(x)
            least, most = x.min().item(), x.max().item()
            seconds = perf_counter() - started
            if least != most or most != size * (size + 1) / 2:
                raise RuntimeError(f"the sum over {size} ranks must be {size * (size + 1) / 2}; got {least} to {most}")
    return seconds


def _disk(folder: Path) -> Finding:
    """Writes a file durably, as a checkpoint is written."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    with explained("write", existing), TemporaryDirectory(prefix=".megalith-doctor-", dir=existing) as name:
        content = os.urandom(_NUM_BYTES)
        started = perf_counter()
        LocalStore(Path(name)).write("file", [memoryview(content)])
        seconds = perf_counter() - started
        if LocalStore(Path(name)).read("file") != content:
            raise StorageError(f"{existing} does not return what was written to it; choose a folder on another disk")
    rate = quantity(_NUM_BYTES / seconds)
    return Finding("ok", "disk", f"{_NUM_BYTES >> 20} MiB written to {existing} at {rate}B/s, with flushing")


def _missing(device: torch.device) -> Iterator[Finding]:
    """Yields the parts that are not there, with what they are for."""
    for package, purpose, extra in optional.missing():
        yield Finding("off", package, f"not installed; for {purpose}: pip install 'megalith[{extra}]'")
    if (reason := why_no_energy(device)) is not None:
        yield Finding("off", "energy", f"train.log_energy cannot measure: {reason}")
