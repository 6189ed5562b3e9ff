"""The parts of a report's page, each as HTML, or "" when the run has nothing to show there. All text is escaped."""

import math
from collections.abc import Iterable
from html import escape
from itertools import pairwise
from typing import TypeGuard

from megalith.insight.report_charts import Chart, Level, Line, Mark, is_spread_out, smoothed, svg
from megalith.insight.report_layout import layout_svg
from megalith.insight.run_history import Phase, RunHistory
from megalith.observe.units import duration, quantity

__all__ = ["sections", "summary", "tiles"]

_LARGE = {"wide": (1020, 330), "medium": (640, 300), "narrow": (350, 270)}  # pixels, by width of the window
_SMALL = (310, 170)
_COLOURS = 6  # series of the page


def summary(run: RunHistory) -> str:
    """The run in a few sentences."""
    parameters = run.about.get("parameters")
    subject = f"{quantity(parameters)} parameters" if isinstance(parameters, int) else "A model"
    tokens = run.last("tokens")
    amount = f"{quantity(tokens)} tokens" if tokens else _steps(run.training[-1]["step"])
    time = f" in {duration(run.seconds)}" if math.isfinite(run.seconds) else ""
    sentences = [f"{subject} trained on {amount}{time}."]
    if run.valid_loss is not None:
        bigram = run.evaluation.get("bigram_loss")
        sentences.append(f"Held-out loss: {run.valid_loss:.3f} nats per token{_distance(run.valid_loss, bigram)}.")
    if len(run.phases) > 3:
        sentences.append(f"The layout changed {len(run.phases) - 1} times.")
    else:
        sentences += [
            f"The layout changed from {before.layout} to {after.layout} after step {before.last_step:,}."
            for before, after in pairwise(run.phases)
        ]
    nonfinite = sum(not math.isfinite(loss) for loss in run.column("loss")[1])
    if nonfinite:
        sentences.append(f"The loss was not finite in {nonfinite} of {len(run.training)} records.")
    return escape(" ".join(sentences))


def tiles(run: RunHistory) -> str:
    """The headline numbers."""
    step = run.training[-1]["step"]
    loss, tokens, mfu = run.last("loss"), run.last("tokens"), run.last("mfu")
    parameters = run.about.get("parameters")
    speeds = sorted(value for value in run.column("tokens_per_second")[1] if math.isfinite(value))
    shown = []
    if run.valid_loss is not None:
        shown.append(
            ("Held-out loss", f"{run.valid_loss:.3f}", f"perplexity {math.exp(min(20.0, run.valid_loss)):,.1f}")
        )
    if loss is not None:
        shown.append(("Training loss", f"{loss:.3f}", "at the last step"))
    if tokens is not None:
        shown.append(("Tokens", quantity(tokens), f"in {_steps(step)}"))
    if speeds:
        note = "median" if mfu is None else f"median; {mfu:.1%} of the peak FLOPs at the end"
        shown.append(("Tokens per second", quantity(speeds[len(speeds) // 2]), note))
    if math.isfinite(run.seconds):
        shown.append(("Training time", duration(run.seconds), f"{duration(run.seconds / step)} a step"))
    if isinstance(parameters, int):
        shown.append(("Parameters", quantity(parameters), f"{parameters:,}"))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=note>{escape(note)}</dd></div>"
        for name, value, note in shown
    )


def sections(run: RunHistory) -> str:
    """Everything below the headline numbers."""
    marks = [
        Mark(before.last_step + 0.5, f"{before.layout} → {after.layout}") for before, after in pairwise(run.phases)
    ]
    return "".join(
        [_loss(run, marks), _baselines(run), _small_charts(run, marks), _phases(run), _samples(run), _about(run),
         _settings(run)]
    )  # fmt: skip


def _loss(run: RunHistory, marks: list[Mark]) -> str:
    steps, losses = run.column("loss")
    if not any(map(math.isfinite, losses)):
        return ""
    lines = [Line(steps, losses, width=1.2, opacity=0.35), Line(steps, smoothed(losses), width=2.2)]
    if len(steps) < 20:
        lines = [Line(steps, losses)]
    legend = [("series-1", "training")]
    if run.evaluations:
        lines.append(Line(*_columns(run.evaluations), colour="--series-2", dots=True))
        legend.append(("series-2", "held out"))
    if marks:
        legend.append(("mark", "change of layout"))
    levels = [
        Level(name, float(run.evaluation[field]))
        for name, field in (("unigram", "unigram_loss"), ("interpolated bigram", "bigram_loss"))
        if _is_finite(run.evaluation.get(field))
    ]
    describe = f"Loss over {_steps(steps[-1])}, from {losses[0]:.2f} to {losses[-1]:.2f} nats per token"
    drawn = "".join(
        f'<div class="{window}">{svg(Chart(f"loss-{window}", describe, lines, levels, marks), *size)}</div>'
        for window, size in _LARGE.items()
    )
    return _card("Loss", "nats per token, over steps", _legend(legend) + drawn)


def _baselines(run: RunHistory) -> str:
    fields = (("Unigram", "unigram_loss"), ("Interpolated bigram", "bigram_loss"))
    losses = [(name, float(run.evaluation[key]), "") for name, key in fields if _is_finite(run.evaluation.get(key))]
    if not losses or run.valid_loss is None or not math.isfinite(run.valid_loss):
        return ""
    losses.append(("This model", run.valid_loss, " ours"))
    longest = max(loss for _, loss, _ in losses)
    rows = "".join(
        f'<div class="row{kind}"><span>{name}</span><i style="width: {100 * loss / longest:.1f}%"></i>'
        f"<b>{loss:.3f}</b></div>"
        for name, loss, kind in losses
    )
    return _card(
        "Against counting", "held-out loss, nats per token; shorter is better", f'<div class="bars">{rows}</div>'
    )


def _small_charts(run: RunHistory, marks: list[Mark]) -> str:
    wanted = (
        ("lr", "Learning rate", "", "{:.2g}".format),
        ("grad_norm", "Gradient norm", "before clipping", "{:.4g}".format),
        ("tokens_per_second", "Throughput", "tokens per second", _speed),
    )
    unlabelled = [Mark(mark.step, "") for mark in marks]
    cards = []
    for number, (field, title, note, form) in enumerate(wanted, start=1):
        steps, values = run.column(field)
        if steps:
            describe = f"{title} over {_steps(steps[-1])}; at the end {form(values[-1])}"
            lines = [Line(steps, values, width=1.6, colour=f"--series-{number}")]
            logarithmic = field == "grad_norm" and is_spread_out(values)
            chart = Chart(field, describe, lines, (), unlabelled, form, logarithmic, from_zero=True)
            drawn = svg(chart, *_SMALL)
            cards.append(_card(title, note, drawn) if drawn else "")
    return f'<div class="columns">{"".join(cards)}</div>' if any(cards) else ""


def _phases(run: RunHistory) -> str:
    longest = {name: seconds for phase in run.phases for name, seconds in phase.time.items()}
    shown = sorted(longest, key=lambda name: longest[name], reverse=True)[:_COLOURS]
    spans = [name for name in longest if name in shown]  # what has no colour of its own counts as other
    slowest = max((phase.step_seconds for phase in run.phases if phase.step_seconds > 0), default=math.nan)
    parts = [_phase(phase, spans, slowest) for phase in run.phases]
    if not any(parts):
        return ""
    timed = any(phase.time and phase.step_seconds > 0 for phase in run.phases)
    note = "where a step's time goes, and which rank sits where" if timed else "which rank sits where"
    return _card("Layout" if len(parts) == 1 else "Layouts", note, f'<div class="phases">{"".join(parts)}</div>')


def _phase(phase: Phase, spans: list[str], slowest: float) -> str:
    drawing, time = layout_svg(phase.layout), ""
    if phase.time and phase.step_seconds > 0:
        known = [
            (name, phase.time[name], f"series-{number}") for number, name in enumerate(spans, 1) if name in phase.time
        ]
        rest = phase.step_seconds - sum(seconds for _, seconds, _ in known)
        if rest > 0.005 * phase.step_seconds:
            known.append(("other", rest, "other"))
        bar = "".join(
            f'<i class="{colour}" style="flex-grow: {1e6 * seconds:.0f}"></i>' for _, seconds, colour in known
        )
        rows = "".join(
            f'<tr><td><i class="{colour}"></i>{escape(name)}<td>{duration(seconds)}'
            f"<td>{seconds / phase.step_seconds:.0%}"
            for name, seconds, colour in known
        )
        width = 100 * phase.step_seconds / slowest
        time = f'<div class="stack" style="width: {width:.1f}%">{bar}</div><table>{rows}</table>'
    if not drawing and not time:
        return ""
    steps = f"steps {phase.first_step:,} to {phase.last_step:,}"
    per_step = f", {duration(phase.step_seconds)} each" if phase.step_seconds > 0 else ""
    return f"<div><h3>{escape(phase.layout)} <small>{steps}{per_step}</small></h3>{drawing}{time}</div>"


def _samples(run: RunHistory) -> str:
    texts = "".join(
        f"<pre><mark>{escape(str(sample.get('prompt', '')))}</mark>{escape(str(sample.get('text', '')))}</pre>"
        for sample in run.samples
    )
    return _card("Samples", "the prompt is marked", f'<div class="samples">{texts}</div>') if texts else ""


def _about(run: RunHistory) -> str:
    facts = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(fact))}</dd></div>"
        for name, fact in run.about.items()
        if name != "parameters"
    )
    return _card("Machine and versions", "", f'<dl class="facts">{facts}</dl>') if facts else ""


def _settings(run: RunHistory) -> str:
    if not run.settings:
        return ""
    return f'<details class="card"><summary>Resolved settings</summary><pre>{escape(run.settings)}</pre></details>'


def _card(title: str, note: str, content: str) -> str:
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<section class="card"><h2>{escape(title)}{small}</h2>{content}</section>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return (
        f'<p class="legend">{"".join(f"<span><i class={kind}></i>{escape(name)}</span>" for kind, name in entries)}</p>'
    )


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _distance(loss: float, bigram: object) -> str:
    if not _is_finite(bigram):
        return ""
    return f", {abs(bigram - loss):.3f} {'below' if loss < bigram else 'above'} an interpolated bigram"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else quantity(value)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)
