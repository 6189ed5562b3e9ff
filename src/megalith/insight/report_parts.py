"""What the sections of a report share: cards, legends, stacked bars with their tables, numbers as text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

from megalith.observe.units import duration

__all__ = ["Part", "breakdown", "card", "is_finite", "legend", "num_steps"]

_NEARLY_ALL = 0.9  # of a bar: a part that takes more leaves the others too small to be told apart


@dataclass(frozen=True)
class Part:
    """Seconds that were spent on one thing, and the class of its colour."""

    name: str
    seconds: float
    colour: str


def card(title: str, note: str, content: str) -> str:
    """A section of the page; ``content`` is HTML, the rest text."""
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<section class="card"><h2>{escape(title)}{small}</h2>{content}</section>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(class of the sample, its name) for each entry."""
    return (
        f'<p class="legend">{"".join(f"<span><i class={kind}></i>{escape(name)}</span>" for kind, name in entries)}</p>'
    )


def breakdown(parts: Sequence[Part], width: float = 100.0) -> str:
    """A bar of ``width`` percent of its place, cut into ``parts``, over a table of them.

    Where one part takes nearly all of it, a second bar enlarges the others, so that each can be seen.
    """
    total = math.fsum(part.seconds for part in parts)
    bars = f'<div class="stack" style="width: {width:.1f}%">{_pieces(parts)}</div>'
    largest = max(parts, key=lambda part: part.seconds)
    others = [part for part in parts if part is not largest]
    if len(others) > 1 and largest.seconds > _NEARLY_ALL * total:
        rest = math.fsum(part.seconds for part in others)
        text = f"without {largest.name}: the other {_percent(rest / total)}, enlarged"
        bars += f'<p class="enlarged">{escape(text)}</p><div class="stack thin">{_pieces(others)}</div>'
    rows = "".join(
        f'<tr><td><i class="{part.colour}"></i>{escape(part.name)}<td>{duration(part.seconds)}'
        f"<td>{_percent(part.seconds / total)}"
        for part in parts
    )
    return f"{bars}<table>{rows}</table>"


def num_steps(count: int) -> str:
    """``count`` steps, in words."""
    return f"{count:,} step{'s' * (count != 1)}"


def is_finite(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number that can be shown."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _pieces(parts: Sequence[Part]) -> str:
    return "".join(f'<i class="{part.colour}" style="flex-grow: {1e6 * part.seconds:.0f}"></i>' for part in parts)


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.0995 <= share <= 0.9 else f"{100 * share:.1f}%"
