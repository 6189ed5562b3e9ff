"""Where the time of a step goes, by kernel on a GPU and by operator on a CPU, and what is left of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["Part", "as_markdown", "parts_of"]

_STEPS = 2  # profiled together
_LONGEST = 70  # characters of a name: those of C++ kernels go on for lines


class Part(NamedTuple):
    """A kernel or operator: seconds a step by itself, and how often a step launches it."""

    name: str
    seconds: float
    launches: float


def parts_of(step: Callable[[], Any], device: str) -> list[Part]:
    """Of a step, the longest part first. Nothing is left out: what runs at the same time counts each for itself."""
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
    """A table of the ``rows`` longest parts, the others together, and what is left of a step of ``seconds``."""
    others = parts[rows:]
    shown = [
        *parts[:rows],
        Part("all others", sum(part.seconds for part in others), sum(part.launches for part in others)),
        Part("nothing", seconds - sum(part.seconds for part in parts), 0),
    ]
    lines = ["| part | ms a step | % | launches |", "|---" * 4 + "|"]
    lines += [
        f"| {part.name.replace('|', '/')} | {1e3 * part.seconds:.2f} | {100 * part.seconds / seconds:.1f} "
        f"| {part.launches:g} |"
        for part in shown
    ]
    return "\n".join(lines) + "\n"
