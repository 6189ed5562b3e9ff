"""Time and memory of one call, on a CPU and on a GPU."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Clock", "Memory", "copy_bandwidth", "memory_of", "product_rate"]

_LARGE = {"cuda": 8192, "cpu": 256}  # size of the square matmul that defines the matmul rate
_L2 = 256 << 20  # bytes that evict everything else from a GPU's L2 cache
_PROBE = 1 << 20  # cycles of the sleep that measures the length of a cycle
_AHEAD = 2.0  # the device sleeps this many times as long as the host took to launch the previous call
_LEAST_SLEEP = 5e-5  # seconds
_LONG = 0.5  # seconds; a longer launch is measured again


class Memory(NamedTuple):
    """Bytes a call allocates in total, and its peak beyond what was allocated before."""

    allocated: int
    peak: int


class Clock:
    """Times calls on ``device``.

    On a GPU with CUDA events and a cold L2 cache. The device sleeps before the first event until the host has launched
    the call and the last event: otherwise the time between them would be that of Python whenever the work is shorter
    than its launch. If a call waits for the device, the wait is included.
    """

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        if self._gpu:
            self._flush = torch.zeros(_L2 // 4, device=device)
            self._cycles_per_second = self._measure_cycles()

    def seconds(self, call: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds per call over ``repeats`` calls: the mean on a CPU, the median on a GPU."""
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
            self._flush.amax()  # read, not written: written data would be evicted during the timed call
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
        """Seconds the host needs to launch ``call``."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds

    def _measure_cycles(self) -> float:
        """Cycles of ``torch.cuda._sleep`` per second."""
        torch.cuda._sleep(_PROBE)  # the first call loads the kernel
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        torch.cuda._sleep(_PROBE)
        end_event.record()
        torch.cuda.synchronize()
        return _PROBE / (float(start_event.elapsed_time(end_event)) / 1e3)


def copy_bandwidth(clock: Clock, device: str, num_bytes: int) -> float:
    """Bytes read and written per second by a copy of ``num_bytes``."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / min(clock.seconds(lambda: target.copy_(source), 3) for _ in range(3))


def product_rate(clock: Clock, device: str) -> float:
    """FLOP/s of a large bfloat16 matmul of random numbers: zeros draw less power and therefore run faster."""
    size = _LARGE[device]
    left, right = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    return 2 * size**3 / clock.seconds(lambda: torch.mm(left, right, out=out), 9)


def memory_of(call: Callable[[], Any], device: str) -> Memory:
    """The memory that ``call`` allocates; on a GPU only the peak is known, and both fields have it."""
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
