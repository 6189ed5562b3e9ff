"""Contests in a child process: an operation that crashes it loses only its own row."""

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator

import torch

from benchmarks.fusions.clock import Clock, copy_bandwidth
from benchmarks.fusions.contest import SAMPLE, Contest, contest, failed
from benchmarks.fusions.registry import OPERATIONS
from benchmarks.fusions.report import contest_from
from benchmarks.restartable import Item, Line, lines_of

__all__ = ["Timed", "timed", "timings"]

_LIMIT = 1800.0  # seconds per contest: torch.compile and slow peers take long
_LEAST_COPIED = 16 << 20
Timed = tuple[str, torch.dtype, int]  # operation, dtype, bytes of the largest tensor


def timings(rows: Iterable[Timed], device: str, rounds: int) -> Iterator[tuple[Contest, float, float]]:
    """Yields for each row the contest, the copy bandwidth after it, and the seconds that both took."""
    rows = list(rows)
    items = [
        Item(f"{name}, {dtype}, {num_bytes >> 20} MiB", (name, num_bytes, str(dtype), device, rounds))
        for name, dtype, num_bytes in rows
    ]
    for (name, dtype, num_bytes), line in zip(rows, lines_of(timed, items, _LIMIT, float("inf")), strict=True):
        if "failure" in line:
            yield failed(OPERATIONS[name], num_bytes, dtype, line["failure"]), float("nan"), float("nan")
        else:
            yield contest_from(line["contest"]), line["bandwidth"], line["seconds"]


def timed(
    name: str,
    num_bytes: int,
    dtype: str,
    device: str,
    rounds: int,
    only: Collection[str] | None = None,
    sample: float = SAMPLE,
) -> Line:
    """The contest as a dict, and the bandwidth of a copy of the same size, in the same process."""
    start = time.perf_counter()
    torch.compiler.reset()
    kind = getattr(torch, dtype.removeprefix("torch."))
    found = contest(OPERATIONS[name], num_bytes, kind, device, rounds, only, sample)
    bandwidth = copy_bandwidth(Clock(device), device, max(num_bytes, _LEAST_COPIED))
    return {
        "contest": dataclasses.asdict(found),
        "bandwidth": bandwidth,
        "seconds": time.perf_counter() - start,
    }
