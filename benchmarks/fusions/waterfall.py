"""Time breakdown of a step, by kernel on a GPU and by operator on a CPU, and the unattributed rest."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["Part", "as_markdown", "parts_of"]

_STEPS = 2  # profiled together
_LONGEST = 70  # characters of a name: C++ kernels have very long ones


class Part(NamedTuple):
    """A kernel or operator: its own seconds per step, and its launches per step."""

    name: str
    seconds: float
    launches: float


def parts_of(step: Callable[[], Any], device: str) -> list[Part]:
    """All parts of a step, longest first. Parts that run concurrently are each counted in full."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    parts = [
        Part(
            event.key[:_LONGEST],
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6 / _STEPS,
            event.count / _STEPS,
        )
        for event in profiler.key_averages()
        if event.device_type == kind and not _is_of_the_optimizer(event.key)  # a span around kernels, not one of them
    ]
    return sorted(parts, key=lambda part: part.seconds, reverse=True)


def _is_of_the_optimizer(name: str) -> bool:
    return name.startswith("Optimizer.")


def as_markdown(parts: list[Part], seconds: float, rows: int = 25) -> str:
    """A table of the ``rows`` longest parts, the sum of the others, and the unattributed rest of ``seconds``."""
    others = parts[rows:]
    shown = [
        *parts[:rows],
        Part("all others", sum(part.seconds for part in others), sum(part.launches for part in others)),
        Part("unattributed", seconds - sum(part.seconds for part in parts), 0),
    ]
    lines = ["| part | ms a step | % | launches |", "|---" * 4 + "|"]
    lines += [
        f"| {part.name.replace('|', '/')} | {1e3 * part.seconds:.2f} | {100 * part.seconds / seconds:.1f} "
        f"| {part.launches:g} |"
        for part in shown
    ]
    return "\n".join(lines) + "\n"
