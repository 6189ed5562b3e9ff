"""Shared elements of report sections: cards, legends, stacked bars with tables, formatted numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

from megalith.observe.units import duration

__all__ = ["Part", "breakdown", "card", "is_finite", "legend", "num_steps"]

_NEARLY_ALL = 0.9  # of a bar; if a part takes more, the others are too small to be distinguished


@dataclass(frozen=True)
class Part:
    """Seconds spent on one kind of work, and the CSS class of its colour."""

    name: str
    seconds: float
    colour: str


def card(title: str, note: str, content: str) -> str:
    """A section of the page; ``content`` is HTML, ``title`` and ``note`` are text."""
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<section class="card"><h2>{escape(title)}{small}</h2>{content}</section>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A legend of ``entries`` (CSS class, name)."""
    return (
        f'<p class="legend">{"".join(f"<span><i class={kind}></i>{escape(name)}</span>" for kind, name in entries)}</p>'
    )


def breakdown(parts: Sequence[Part], width: float = 100.0) -> str:
    """A stacked bar of ``parts``, ``width`` percent of the available width, above a table of them.

    If one part takes nearly all of the bar, a second bar enlarges the others.
    """
    total = math.fsum(part.seconds for part in parts)
    bars = f'<div class="stack" style="width: {width:.1f}%">{_pieces(parts)}</div>'
    largest = max(parts, key=lambda part: part.seconds)
    others = [part for part in parts if part is not largest]
    if len(others) > 1 and largest.seconds > _NEARLY_ALL * total:
        rest = math.fsum(part.seconds for part in others)
        text = f"the other {_percent(rest / total)}, without {largest.name}, enlarged"
        bars += f'<p class="enlarged">{escape(text)}</p><div class="stack thin">{_pieces(others)}</div>'
    rows = "".join(
        f'<tr><td><i class="{part.colour}"></i>{escape(part.name)}<td>{duration(part.seconds)}'
        f"<td>{_percent(part.seconds / total)}"
        for part in parts
    )
    return f"{bars}<table>{rows}</table>"


def num_steps(count: int) -> str:
    """Formats a number of steps, such as "1 step"."""
    return f"{count:,} step{'s' * (count != 1)}"


def is_finite(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _pieces(parts: Sequence[Part]) -> str:
    return "".join(f'<i class="{part.colour}" style="flex-grow: {1e6 * part.seconds:.0f}"></i>' for part in parts)


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.0995 <= share <= 0.9 else f"{100 * share:.1f}%"
