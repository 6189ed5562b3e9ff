"""Formats contests as Markdown and as JSON."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.fusions.clock import Memory
from benchmarks.fusions.contest import Contest, Figures
from benchmarks.fusions.operation import BASE
from benchmarks.rounds import Spread

__all__ = ["Run", "as_json", "as_markdown", "contest_from", "from_json", "table"]

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Run:
    """All contests of one pass over the operations, and the copy bandwidth measured after each."""

    contests: Sequence[Contest]
    bandwidths: Sequence[float]


def as_json(runs: Sequence[Run], machine: Mapping[str, str], date: str) -> dict[str, Any]:
    """All measurements, with seconds and bytes unrounded."""
    return {
        "date": date,
        "machine": dict(machine),
        "runs": [
            {"bandwidths": list(run.bandwidths), "contests": [dataclasses.asdict(one) for one in run.contests]}
            for run in runs
        ],
    }


def from_json(kept: Mapping[str, Any]) -> list[Run]:
    """The inverse of ``as_json``, also after a round trip through a file."""
    return [Run([contest_from(one) for one in run["contests"]], run["bandwidths"]) for run in kept["runs"]]


def as_markdown(runs: Sequence[Run], machine: Mapping[str, str], date: str) -> str:
    """A row for each operation and size: speed-up over torch eager, of the forward and with the backward; memory."""
    device = machine["device"]
    names = list(dict.fromkeys(name for run in runs for one in run.contests for name in one.figures if name != BASE))
    lines = [f"## Fused operations on {device}, {date}", ""]
    lines += [f"Speed-up over {BASE}: forward / forward and backward [quartiles of the latter]."]
    best = f"the best of {len(runs)} runs" if len(runs) > 1 else "one run"
    rounds = max(len(one.figures[BASE].both) for one in runs[0].contests)
    lines += [f"Of {best}, each the median of {rounds} interleaved rounds.", ""]
    lines += table(runs, names, range(len(runs[0].contests)))
    rates = [rate / 1e9 for run in runs for rate in run.bandwidths if rate == rate] or [float("nan")]
    lines += ["", f"Calibration: copy {statistics.median(rates):.1f} GB/s [{min(rates):.1f}..{max(rates):.1f}]."]
    lines += ["", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    return "\n".join(lines)


def table(runs: Sequence[Run], names: Sequence[str], indices: Iterable[int]) -> list[str]:
    """Lines of Markdown: the contests at ``indices``, with a column for each contender in ``names``."""
    head = ["operation", "dtype", "MiB", *names, "of copy, forward / backward", "peak MiB, ours / eager"]
    return [_row(head), _row(["---"] * len(head)), *(_row(_cells(runs, index, names)) for index in indices)]


def _cells(runs: Sequence[Run], index: int, names: Sequence[str]) -> list[str]:
    one = runs[0].contests[index]
    best = max(runs, key=lambda run: _median(run.contests[index].ratio("Megalith", both=True)))
    share = best.contests[index].share("Megalith", best.bandwidths[index])
    return [
        one.operation,
        one.dtype,
        f"{one.num_bytes / MIB:.0f}",
        *(_best(runs, index, name) for name in names),
        "" if share is None else f"{share[0]:.0%} / {share[1]:.0%}",
        " / ".join(_peak(figures) for figures in (one.figures["Megalith"], one.figures[BASE])),
    ]


def _best(runs: Sequence[Run], index: int, name: str) -> str:
    """The cell of contender ``name``, from the run in which it was fastest."""
    figures = runs[0].contests[index].figures.get(name)
    if figures is None:
        return ""
    if figures.failure:
        return figures.failure.replace("|", "/")
    both = max((run.contests[index].ratio(name, both=True) for run in runs), key=_median)
    forward = max((run.contests[index].ratio(name, both=False) for run in runs), key=_median)
    if both is None or forward is None:
        return "torch eager failed"
    return f"{forward.median:.2f} / {both.median:.2f} [{both.low:.2f}..{both.high:.2f}]"


def _peak(figures: Figures) -> str:
    return "" if figures.memory is None else f"{figures.memory.peak / MIB:.1f}"


def _median(spread: Spread | None) -> float:
    return 0.0 if spread is None else spread.median


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def contest_from(kept: Mapping[str, Any]) -> Contest:
    """The inverse of ``dataclasses.asdict``, also after a round trip through a file."""
    figures = {name: _figures(one) for name, one in kept["figures"].items()}
    return Contest(kept["operation"], kept["dtype"], kept["num_bytes"], kept["floor"], figures)


def _figures(kept: Mapping[str, Any]) -> Figures:
    """Figures from JSON, where keys are strings and tuples are lists."""
    forward, both = ({int(index): one for index, one in kept[name].items()} for name in ("forward", "both"))
    memory = kept["memory"]
    return Figures(forward, both, None if memory is None else Memory(*memory), kept["failure"])
