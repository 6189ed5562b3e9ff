"""Where the time went: in the whole run, and in a median step of each layout, with a drawing of its ranks."""

import math
from html import escape

from megalith.insight.report_layout import layout_svg
from megalith.insight.report_parts import Part, breakdown, card
from megalith.insight.run_history import Phase, RunHistory
from megalith.observe.metrics import COMPILE
from megalith.observe.units import duration

__all__ = ["phases", "time_of_the_run"]

_COLOURS = 6  # colours for spans
# span of the whole run: (name on the page, CSS class); other spans keep their names
_NAMES = {
    "training": ("training steps", "training"),
    COMPILE: ("waiting for the compiler", "compile"),
    "evaluation": ("evaluations", "held-out"),
    "checkpoint": ("checkpoints", "checkpoint"),
}


def time_of_the_run(run: RunHistory) -> str:
    """The breakdown of the run's time; "" if only steps were recorded."""
    if len(run.time) < 2:
        return ""
    in_order = [name for name in _NAMES if name in run.time]
    in_order += [name for name in run.time if name not in _NAMES]
    parts = [
        Part(_NAMES.get(name, (name, ""))[0], run.time[name], _NAMES.get(name, ("", "other"))[1]) for name in in_order
    ]
    return card("Time", f"{duration(run.seconds)} in total, by activity", breakdown(parts))


def phases(run: RunHistory) -> str:
    """Each layout with its ranks, and the breakdown of a median step."""
    longest = {name: seconds for phase in run.phases for name, seconds in phase.time.items()}
    shown = sorted(longest, key=lambda name: longest[name], reverse=True)[:_COLOURS]
    spans = [name for name in longest if name in shown]  # spans without a colour count as other
    slowest = max((phase.step_seconds for phase in run.phases if phase.step_seconds > 0), default=math.nan)
    parts = [_phase(phase, spans, slowest) for phase in run.phases]
    if not any(parts):
        return ""
    timed = any(phase.time and phase.step_seconds > 0 for phase in run.phases)
    note = "placement of ranks, and time breakdown of a median step" if timed else "placement of ranks"
    return card("Layout" if len(parts) == 1 else "Layouts", note, f'<div class="phases">{"".join(parts)}</div>')


def _phase(phase: Phase, spans: list[str], slowest: float) -> str:
    drawing, time = layout_svg(phase.layout), ""
    if phase.time and phase.step_seconds > 0:
        parts = [
            Part(name, phase.time[name], f"span-{number}") for number, name in enumerate(spans, 1) if name in phase.time
        ]
        rest = phase.step_seconds - math.fsum(part.seconds for part in parts)
        if rest > 0.005 * phase.step_seconds:
            parts.append(Part("other", rest, "other"))
        time = breakdown(parts, 100 * phase.step_seconds / slowest)
    if not drawing and not time:
        return ""
    steps = f"steps {phase.first_step:,} to {phase.last_step:,}"
    per_step = f", {duration(phase.step_seconds)} each (median)" if phase.step_seconds > 0 else ""
    return f"<div><h3>{escape(phase.layout)} <small>{steps}{per_step}</small></h3>{drawing}{time}</div>"
