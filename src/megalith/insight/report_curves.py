"""Curves over steps: the loss, in full and enlarged, the learning rate, the gradient norm and the throughput."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megalith.insight.report_charts import Chart, Level, Line, Mark, is_spread_out, smoothed, smoothing_window, svg
from megalith.insight.report_parts import card, is_finite, legend, num_steps
from megalith.insight.run_history import Phase, RunHistory
from megalith.observe.units import quantity

__all__ = ["loss_curves", "small_curves"]

# width and height in pixels, by window width
_WHOLE = {"wide": (1020, 330), "medium": (640, 300), "narrow": (350, 270)}
_ENLARGED = {"wide": (1020, 250), "medium": (640, 240), "narrow": (350, 220)}
_SMALL = (310, 170)
_FEW = 20  # fewer records are neither smoothed nor enlarged
_WORTH_ENLARGING = 0.6  # of the full axis; a curve that uses more of it is not enlarged
_LEAST_SPREAD = 0.2  # minimum axis range relative to the median, so that small variations look small


def loss_curves(run: RunHistory) -> str:
    """Training and held-out loss over all steps, and again over the later steps on a separate axis."""
    steps, losses = run.column("loss")
    if not any(map(math.isfinite, losses)):
        return ""
    lines, entries = [Line(steps, losses)], [("training", "training")]
    if len(steps) >= _FEW:
        window = smoothing_window(len(steps)) * max(1, round((steps[-1] - steps[0]) / (len(steps) - 1)))
        lines = [Line(steps, losses, width=1.2, opacity=0.35), Line(steps, smoothed(losses), width=2.2)]
        entries = [("training-raw", "training, each step"), ("training", f"smoothed over {num_steps(window)}")]
    if run.evaluations:
        at, held_out = zip(*run.evaluations, strict=True)
        lines.append(Line(at, held_out, colour="--held-out", dots=True))
        entries.append(("held-out", "held out"))
    marks = _changes(run)
    if marks:
        entries.append(("mark", "layout change"))
    levels = [
        Level(name, float(run.evaluation[field]))
        for name, field in (("unigram", "unigram_loss"), ("interpolated bigram", "bigram_loss"))
        if is_finite(run.evaluation.get(field))
    ]
    describe = f"Loss over {num_steps(steps[-1])}, from {losses[0]:.2f} to {losses[-1]:.2f} {run.loss_unit}"
    drawn = _in_windows(Chart("loss", describe, lines, levels, marks), _WHOLE)
    return card("Loss", f"{run.loss_unit} by step", legend(entries) + drawn + _enlarged(lines, levels, marks))


def small_curves(run: RunHistory) -> str:
    """Learning rate, gradient norm and throughput, side by side."""
    cards = [
        _small(run, "lr", "Learning rate", "", "{:.2g}".format),
        _small(run, "grad_norm", "Gradient norm", "before clipping", "{:.4g}".format),
        _throughput(run),
    ]
    return f'<div class="columns">{"".join(cards)}</div>' if any(cards) else ""


def _enlarged(lines: Sequence[Line], levels: Sequence[Level], marks: Sequence[Mark]) -> str:
    """The steps after the first fifth, on an axis that fits them; "" if the full chart shows them as well."""
    steps = lines[0].steps
    if len(steps) < _FEW:
        return ""
    first = steps[len(steps) // 5]
    later = [line for line in (_since(line, first) for line in lines) if line.values]
    limits = _usual([value for line in later for value in line.values])
    whole = [value for line in lines for value in line.values if math.isfinite(value)]
    if limits is None or limits[1] - limits[0] > _WORTH_ENLARGING * (max(whole) - min(whole)):
        return ""
    chart = Chart(
        "loss-later",
        f"Loss from step {first:,} on, enlarged",
        later,
        [level for level in levels if limits[0] < level.value < limits[1]],
        [Mark(mark.step, "") for mark in marks if mark.step > first],
        limits=limits,
        from_step=first,
    )
    return f"<h3>From step {first:,} on, enlarged</h3>" + _in_windows(chart, _ENLARGED)


def _small(run: RunHistory, field: str, title: str, note: str, form: Callable[[float], str]) -> str:
    steps, values = run.column(field)
    if not steps:
        return ""
    describe = f"{title} over {num_steps(steps[-1])}, ending at {form(values[-1])}"
    lines = [Line(steps, values, width=1.6, colour="--measure")]
    logarithmic = field == "grad_norm" and is_spread_out(values)
    drawn = svg(Chart(field, describe, lines, (), _unnamed_changes(run), form, logarithmic, from_zero=True), *_SMALL)
    return card(title, note, drawn) if drawn else ""


def _throughput(run: RunHistory) -> str:
    """Throughput on an axis of typical values: slow steps after a start would flatten the rest of the curve."""
    steps, values = run.column("tokens_per_second")
    if not steps:
        return ""
    settled = [value for phase in run.phases for value in _settled(steps, values, phase)]
    limits = _usual(settled, room=0.3, least=_LEAST_SPREAD)
    outside = sum(not limits[0] <= value <= limits[1] for value in values) if limits else 0
    note = "tokens per second" + (f"; {num_steps(outside)} off scale" if outside else "")
    lines = [Line(steps, values, width=1.6, colour="--measure")]
    if len(steps) >= _FEW:
        smooth = smoothed([value if limits and limits[0] <= value <= limits[1] else math.nan for value in values])
        lines = [replace(lines[0], width=1.0, opacity=0.35), Line(steps, smooth, width=1.8, colour="--measure")]
    describe = f"Throughput over {num_steps(steps[-1])}, ending at {_speed(values[-1])}"
    chart = Chart("tokens_per_second", describe, lines, (), _unnamed_changes(run), _speed, limits=limits)
    drawn = svg(chart, *_SMALL)
    return card("Throughput", note, drawn) if drawn else ""


def _settled(steps: Sequence[int], values: Sequence[float], phase: Phase) -> list[float]:
    """The values in ``phase`` without its first tenth, and without the 5 % lowest and highest of the rest."""
    inside = [
        value
        for step, value in zip(steps, values, strict=True)
        if phase.first_step <= step <= phase.last_step and math.isfinite(value)
    ]
    inside = inside[len(inside) // 10 :]
    if len(inside) < _FEW:
        return inside
    low, high = np.quantile(inside, (0.05, 0.95))
    return [value for value in inside if low <= value <= high]


def _usual(values: Sequence[float], room: float = 0.1, least: float = 0.0) -> tuple[float, float] | None:
    """Axis limits for 99 % of ``values``, with a margin of ``room`` times their range on both sides.

    The axis is at least ``least`` times the median long. None if no value is finite, or the axis would have no length.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = (float(limit) for limit in np.quantile(finite, (0.005, 0.995)))
    around = max(room * (high - low), 0.5 * (least * abs(float(np.median(finite))) - (high - low)))
    return (low - around, high + around) if around > 0 else None


def _since(line: Line, first: int) -> Line:
    kept = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if step >= first]
    return replace(line, steps=[step for step, _ in kept], values=[value for _, value in kept])


def _in_windows(chart: Chart, sizes: Mapping[str, tuple[int, int]]) -> str:
    """``chart`` once for each window width, of which the page shows one."""
    return "".join(
        f'<div class="{window}">{svg(replace(chart, name=f"{chart.name}-{window}"), *size)}</div>'
        for window, size in sizes.items()
    )


def _changes(run: RunHistory) -> list[Mark]:
    return [Mark(before.last_step + 0.5, f"{before.layout} → {after.layout}") for before, after in pairwise(run.phases)]


def _unnamed_changes(run: RunHistory) -> list[Mark]:
    return [Mark(mark.step, "") for mark in _changes(run)]


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else quantity(value)
