"""Seconds and bytes of one call, on a CPU and on a GPU."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Clock", "Memory", "copy_bandwidth", "memory_of"]

_L2 = 256 << 20  # bytes that push everything else out of a GPU's second-level cache


class Memory(NamedTuple):
    """Bytes that a call allocates in all, and at most at one time beyond what was there before."""

    allocated: int
    peak: int


class Clock:
    """Times calls on ``device``; on a GPU by its own events, with a cold second-level cache."""

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        self._flush = torch.empty(_L2 if self._gpu else 0, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], Any], repeats: int = 1) -> float:
        """Of one of ``repeats`` calls: their sum on a CPU, the median on a GPU."""
        if not self._gpu:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start_event, end_event in events:
            self._flush.zero_()
            start_event.record()
            call()
            end_event.record()
        torch.cuda.synchronize()
        times = sorted(start_event.elapsed_time(end_event) for start_event, end_event in events)
        return times[len(times) // 2] / 1e3


def copy_bandwidth(clock: Clock, device: str, num_bytes: int) -> float:
    """Bytes read and written a second by a copy of ``num_bytes``."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / min(clock.seconds(lambda: target.copy_(source), 3) for _ in range(3))


def memory_of(call: Callable[[], Any], device: str) -> Memory:
    """What ``call`` allocates; on a GPU the peak alone is known, and stands for both."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = torch.cuda.max_memory_allocated() - before
        return Memory(peak, peak)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    now = peak = allocated = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            allocated += max(0, event.nbytes())
            peak = max(peak, now)
    return Memory(allocated, peak)
