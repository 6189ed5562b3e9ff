"""Formats a measurement as Markdown and as JSON."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.calibration import RATES
from benchmarks.measure import Measurement
from benchmarks.registry import CASES
from benchmarks.rounds import MOVED, Round, of_rate, ratios, seconds

__all__ = ["as_json", "as_markdown"]

MIB = 1 << 20
_COLUMNS = (
    "contender",
    "ms a run",
    "tokens/s",
    "speed-up over base [quartiles]",
    "of GEMM rate",
    "peak RSS, MiB",
    "first run, s",
    "loss error",
    "worst gradient",
)


def as_json(measurement: Measurement, machine: Mapping[str, str], date: str) -> dict[str, Any]:
    """All measurements, with seconds and bytes unrounded."""
    return {
        "case": measurement.case,
        "size": measurement.size,
        "date": date,
        "base": CASES[measurement.case].base,
        "machine": dict(machine),
        "calibration": measurement.calibration,
        "rounds": [{"kept": one.kept, "moved": one.moved, "seconds": dict(one.seconds)} for one in measurement.rounds],
        "contenders": {name: dataclasses.asdict(entry) for name, entry in measurement.entries.items()},
    }


def as_markdown(measurement: Measurement, machine: Mapping[str, str], date: str) -> str:
    """Title, table of contenders, calibration, and the machine."""
    case = CASES[measurement.case]
    rounds, warning = _quotable(measurement)
    lines = [
        f"## {case.title} ({measurement.size}), {date}",
        "",
        *warning,
        _row(_COLUMNS),
        _row(["---"] * len(_COLUMNS)),
    ]
    lines += [_row(_cells(measurement, name, rounds)) for name in measurement.entries]
    lines += ["", f"Base: {case.base}. {len(measurement.kept)} rounds kept, {_discarded(measurement)} discarded"]
    lines[-1] += f" (a calibrated rate changed by more than {MOVED:.0%})."
    lines += ["", *_calibration_table(measurement.calibration)]
    lines += ["", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    return "\n".join(lines)


def _quotable(measurement: Measurement) -> tuple[Sequence[Round], list[str]]:
    """The rounds that the figures come from, and a warning to print above them."""
    if measurement.kept:
        return measurement.kept, []
    return measurement.rounds, [
        f"**Not to be quoted**: the machine was not quiet in any of {len(measurement.rounds)} rounds. "
        f"The figures cover all of them; run it again when the machine is idle.",
        "",
    ]


def _discarded(measurement: Measurement) -> int:
    return len(measurement.rounds) - len(measurement.kept)


def _cells(measurement: Measurement, name: str, rounds: Sequence[Round]) -> list[str]:
    case, entry = CASES[measurement.case], measurement.entries[name]
    spent = seconds(rounds, name)
    if entry.failure is not None or spent is None or entry.first is None:
        return [name, f"not measured: {(entry.failure or 'no round').replace('|', '/')}", *[""] * (len(_COLUMNS) - 2)]
    size = case.sizes[measurement.size]
    faster = ratios(rounds, name, case.base)
    part = of_rate(rounds, name, case.flops(size) / 1e12, case.contenders[name].matmuls)
    return [
        name,
        f"{1e3 * spent.median:.0f}",
        f"{case.tokens(size) / spent.median:.0f}",
        "" if faster is None else f"{faster.median:.2f} [{faster.low:.2f}..{faster.high:.2f}]",
        "" if part is None else f"{part:.0%}",
        f"{entry.peak_rss / MIB:.0f}",
        f"{entry.first.seconds:.1f}",
        f"{entry.first.loss_error:.1e}",
        "" if entry.first.gradient_error is None else f"{entry.first.gradient_error:.1e}",
    ]


def _calibration_table(calibration: Sequence[Mapping[str, float]]) -> list[str]:
    lines = [_row(["calibration", "before", "between, median [range]", "after"]), _row(["---"] * 4)]
    for name, title in RATES.items():
        values = [rates[name] for rates in calibration]
        between = values[1:-1] or values
        median = statistics.median(between)
        spread = f"{median:.3g} [{min(between):.3g}..{max(between):.3g}]"
        lines.append(_row([title, f"{values[0]:.3g}", spread, f"{values[-1]:.3g}"]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
