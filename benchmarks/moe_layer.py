"""One mixture of experts, forward and backward, on one GPU: speed, memory, host synchronizations, and a CUDA graph.

    python -m benchmarks.moe_layer [--quick] [--out FOLDER]

Contenders take turns in every round, in bfloat16, and are first checked against Hugging Face's layer in float32: our
worst gradient must be within the tolerance, theirs within a wider one.

    Megalith                                    ``MoELayer``, dropless, in one process
    Megalith, in a CUDA graph                   the same, captured as a whole and replayed
    Hugging Face, grouped_mm and eager          its Mixtral block with torch's ``_grouped_mm``, and expert by expert

A row has the time of a run, the FLOP/s relative to an 8192^3 matrix product in the same run, the peak memory beyond
what was allocated before, and how often the host waited for the device. Without a GPU, it runs at a tiny size as a
smoke test; then nothing is counted or captured.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from benchmarks.environment import describe
from benchmarks.experts import TOLERANCE, LayerStep, Size, flops, ours, prepare, theirs
from benchmarks.fusions.clock import Clock, memory_of, product_rate

__all__ = ["Row", "main", "rows_of"]

_FULL = (Size(T=8192, H=4096, F=3584, E=8, K=2), Size(T=8192, H=2048, F=1024, E=64, K=8))
_QUICK = (Size(T=32, H=16, F=32, E=8, K=2),)
_ROUNDS, _WARM = 15, 3
_BASE = "Hugging Face, grouped_mm"
_THEIR_TOLERANCE = 0.1  # the router's gradient is a difference of two sums, which Hugging Face rounds to 16 bits


@dataclass(frozen=True)
class Row:
    """The results of one contender.

    Attributes:
        milliseconds: per run, median over the rounds.
        speed: the speed-up over ``Hugging Face, grouped_mm``, median of the ratios within each round.
        share: fraction of the matmul rate; None without a GPU.
        peak_mib: peak memory beyond what was allocated before.
        gradient_error: of the worst gradient, relative to that of the reference.
        host_waits: how often a run made the host wait for the device; None without a GPU, and for a graph.
        problem: why there is no time, or which gradient error is too large.
    """

    milliseconds: float | None = None
    speed: float | None = None
    share: float | None = None
    peak_mib: float | None = None
    gradient_error: float | None = None
    host_waits: int | None = None
    problem: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moe_layer", description="A mixture of experts on a GPU."
    )
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny size and one round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quick = arguments.quick or device == "cpu"
    found = {str(size): rows_of(size, device, 1 if quick else _ROUNDS) for size in (_QUICK if quick else _FULL)}
    for size, rows in found.items():
        print(f"\n{size}, bfloat16, {device}")
        for name, row in rows.items():
            print(f"  {name:30} {asdict(row)}")
    if not quick:
        record = {
            "environment": describe(),
            "device": torch.cuda.get_device_name(),
            "sizes": _as_tree(found),
        }
        path = arguments.out / f"moe-layer-{datetime.now():%Y%m%d-%H%M}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nresults are in {path}")


def rows_of(size: Size, device: str, rounds: int) -> dict[str, Row]:
    """The row of each contender, by name."""
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(size, folder, device)
        build: Mapping[str, Callable[[], LayerStep]] = {
            "Megalith": partial(ours, size, folder, dtype=torch.bfloat16, device=device),
            _BASE: partial(theirs, size, folder, dtype=torch.bfloat16, experts="grouped_mm", device=device),
            "Hugging Face, eager": partial(theirs, size, folder, dtype=torch.bfloat16, experts="eager", device=device),
        }
        rows, runs = dict[str, Row](), dict[str, Callable[[], object]]()
        for contender, make in build.items():
            allowed = TOLERANCE[torch.bfloat16] if contender == "Megalith" else _THEIR_TOLERANCE
            rows[contender], run = _judged(make, device, allowed)
            if run is not None:
                runs[contender] = run
        if device == "cuda" and "Megalith" in runs:
            graph = "Megalith, in a CUDA graph"
            captured = _captured(runs["Megalith"])
            rows[graph] = Row(problem=captured) if isinstance(captured, str) else Row()
            if not isinstance(captured, str):
                runs[graph] = captured
        seconds = {contender: list[float]() for contender in runs}
        rates = [product_rate(clock, device)]
        for _ in range(rounds):
            for contender, run in runs.items():
                seconds[contender].append(clock.seconds(run))
        rates.append(product_rate(clock, device))
    rate = statistics.fmean(rates)
    return {
        contender: _timed(
            row, seconds.get(contender), seconds.get(_BASE), flops(size) / rate if device == "cuda" else None
        )
        for contender, row in rows.items()
    }


def _judged(make: Callable[[], LayerStep], device: str, allowed: float) -> tuple[Row, Callable[[], object] | None]:
    """The row before anything is timed, and the run, or None if it fails or is wrong."""
    try:
        step = make()
        first = step.first()
        for _ in range(_WARM):
            step.run()
        peak, waits = memory_of(step.run, device).peak / 2**20, _host_waits(step.run) if device == "cuda" else None
    except Exception as error:  # report it in the row, and continue with the others
        return Row(problem=f"{type(error).__name__}: {error}".splitlines()[0]), None
    error = first.gradient_error
    if not (error is not None and error <= allowed):  # "not <=", so that NaN fails
        return Row(problem=f"wrong: a gradient is {error} from the reference, over {allowed}"), None
    return Row(peak_mib=peak, gradient_error=error, host_waits=waits), step.run


def _timed(row: Row, seconds: list[float] | None, base: list[float] | None, least: float | None) -> Row:
    """``row`` with its times; ``least``: seconds its matrix products would take at the measured matmul rate."""
    if not seconds:
        return row
    median = statistics.median(seconds)
    ratios = [theirs / mine for theirs, mine in zip(base, seconds, strict=True)] if base else []
    return Row(
        1e3 * median,
        statistics.median(ratios) if ratios else None,
        None if least is None else least / median,
        row.peak_mib,
        row.gradient_error,
        row.host_waits,
        row.problem,
    )


def _host_waits(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in told)


def _captured(run: Callable[[], object]) -> Callable[[], object] | str:
    """The replay of ``run``, or why it cannot be captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up runs on a side stream, as capture requires
            for _ in range(_WARM):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"cannot be captured: {error}".splitlines()[0]
    return graph.replay


def _as_tree(found: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, dict[str, object]]]:
    return {size: {name: asdict(row) for name, row in rows.items()} for size, rows in found.items()}


if __name__ == "__main__":
    main()
