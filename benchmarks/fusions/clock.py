"""Seconds and bytes of one call, on a CPU and on a GPU."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Clock", "Memory", "copy_bandwidth", "memory_of", "product_rate"]

_LARGE = {"cuda": 8192, "cpu": 256}  # side of the product whose rate is the yardstick
_L2 = 256 << 20  # bytes that push everything else out of a GPU's second-level cache
_PROBE = 1 << 20  # cycles of the sleep that tells how long a cycle is
_AHEAD = 2.0  # the device sleeps so many times as long as the host needed to launch the call before
_LEAST_SLEEP = 5e-5  # seconds
_LONG = 0.5  # seconds


class Memory(NamedTuple):
    """Bytes that a call allocates in all, and at most at one time beyond what was there before."""

    allocated: int
    peak: int


class Clock:
    """Times calls on ``device``.

    On a GPU by its own events, with a cold second-level cache. The device sleeps before the first event until the host
    has launched the call and the last event: else the time between them would be that of Python wherever the work is
    shorter than its launch. A call that waits for the device is timed with its wait.
    """

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        if self._gpu:
            self._flush = torch.zeros(_L2 // 4, device=device)
            self._cycles_per_second = self._measure_cycles()

    def seconds(self, call: Callable[[], Any], repeats: int = 1) -> float:
        """Of one of ``repeats`` calls: their sum on a CPU, the median on a GPU."""
        if not self._gpu:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        host = self._launch_seconds(call)
        if host > _LONG:  # it may have compiled something
            host = self._launch_seconds(call)
        events = []
        for _ in range(repeats):
            self._flush.amax()  # read, not written: what is written must leave the cache while the call is timed
            torch.cuda._sleep(int(max(_AHEAD * host, _LEAST_SLEEP) * self._cycles_per_second))
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            call()
            end_event.record()
            events.append((start_event, end_event))
        torch.cuda.synchronize()
        times = sorted(start_event.elapsed_time(end_event) for start_event, end_event in events)
        return float(times[len(times) // 2]) / 1e3

    def _launch_seconds(self, call: Callable[[], Any]) -> float:
        """What the host needs to launch ``call``."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds

    def _measure_cycles(self) -> float:
        """Cycles of ``torch.cuda._sleep`` in a second."""
        torch.cuda._sleep(_PROBE)  # the first one loads its kernel
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        torch.cuda._sleep(_PROBE)
        end_event.record()
        torch.cuda.synchronize()
        return _PROBE / (float(start_event.elapsed_time(end_event)) / 1e3)


def copy_bandwidth(clock: Clock, device: str, num_bytes: int) -> float:
    """Bytes read and written a second by a copy of ``num_bytes``."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / min(clock.seconds(lambda: target.copy_(source), 3) for _ in range(3))


def product_rate(clock: Clock, device: str) -> float:
    """FLOP/s of a large product in bfloat16, of random numbers: zeros take less power, and so run faster."""
    size = _LARGE[device]
    left, right = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    return 2 * size**3 / clock.seconds(lambda: torch.mm(left, right, out=out), 9)


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
