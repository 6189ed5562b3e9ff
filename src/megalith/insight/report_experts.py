"""Heat maps of the loads of experts: every layer at the last record, and the layer of the worst balance over time."""

from collections.abc import Mapping, Sequence
from html import escape

from megalith.insight.report_parts import card, legend
from megalith.insight.run_history import RunHistory

__all__ = ["expert_loads"]

# the class of a load relative to the mean, by what it is less than, and its name in the legend
_SHADES = (
    (0.0005, "load-none", "no token"),
    (0.5, "load-low", "under half of the mean"),
    (0.9, "load-less", "under 0.9"),
    (1.1, "load-even", "even"),
    (2.0, "load-more", "over 1.1"),
    (4.0, "load-high", "over twice the mean"),
    (float("inf"), "load-most", "over 4 times"),
)
_WINDOWS = {"wide": 1020, "medium": 640, "narrow": 350}  # pixels, by width of the window
_ROW, _LEFT, _BELOW = 16, 56, 22  # pixels: the height of a row, and the room for labels
_MOST_STEPS = 64  # columns over time


def expert_loads(run: RunHistory) -> str:
    """The card of a run with experts; "" of others."""
    if not run.expert_loads:
        return ""
    step, last = run.expert_loads[-1]
    worst = max(last, key=lambda layer: max(last[layer]))
    by_layer = _in_windows(
        f"Loads of the experts of {len(last)} layers at step {step:,}; the greatest is {max(last[worst]):.2f} of the "
        f"mean, in layer {worst}",
        {f"layer {layer}": loads for layer, loads in last.items()},
        ("expert", *map(str, range(max(map(len, last.values()))))),
    )
    kept = _thinned([(at, loads[worst]) for at, loads in run.expert_loads if worst in loads])
    num_experts = min(len(loads) for _, loads in kept)
    over_time = _in_windows(
        f"Loads of the experts of layer {worst} from step {kept[0][0]:,} to {kept[-1][0]:,}",
        {f"{number}": [loads[number] for _, loads in kept] for number in range(num_experts)},
        ("step", *(f"{at:,}" for at, _ in kept)),
    )
    note = f"tokens of each expert relative to the mean of its layer, at step {step:,}"
    return card(
        "Loads of experts",
        note,
        legend((kind, name) for _, kind, name in _SHADES)
        + by_layer
        + f"<h3>Layer {worst}, whose balance was the worst, over steps</h3>"
        + over_time,
    )


def _in_windows(describe: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str]) -> str:
    """The heat map once for each width of the window, of which the page shows one."""
    return "".join(
        f'<div class="{window}">{_svg(describe, rows, columns, width)}</div>' for window, width in _WINDOWS.items()
    )


def _svg(describe: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str], width: int) -> str:
    """``rows`` by name, the first on top; ``columns``: what they are, then their names. One path for each shade."""
    axis, *names = columns
    cell = (width - _LEFT) / len(names)
    paths: dict[str, list[str]] = {}
    for number, loads in enumerate(rows.values()):
        for column, load in enumerate(loads):
            shade = next(kind for limit, kind, _ in _SHADES if load < limit)
            paths.setdefault(shade, []).append(
                f"M{_LEFT + column * cell:.1f} {number * _ROW}h{cell - 1:.1f}v{_ROW - 1}h-{cell - 1:.1f}z"
            )
    drawn = [f'<path class="{kind}" d="{"".join(paths[kind])}"/>' for _, kind, _ in _SHADES if kind in paths]
    every = 1 + (len(rows) - 1) // 32
    drawn += [
        f'<text class="side" x="{_LEFT - 8}" y="{number * _ROW + 12}">{escape(name)}</text>'
        for number, name in enumerate(rows)
        if number % every == 0
    ]
    height = len(rows) * _ROW + _BELOW
    drawn.append(f'<text class="side" x="{_LEFT - 8}" y="{height - 5}">{escape(axis)}</text>')
    every = 1 + int(len(names) * 60 / width)
    drawn += [
        f'<text x="{_LEFT + (column + 0.5) * cell:.1f}" y="{height - 5}">{escape(name)}</text>'
        for column, name in enumerate(names)
        if column % every == 0
    ]
    return (
        f'<svg class="heat" role="img" aria-label="{escape(describe)}" viewBox="0 0 {width} {height}">'
        f"{''.join(drawn)}</svg>"
    )


def _thinned(records: list[tuple[int, list[float]]]) -> list[tuple[int, list[float]]]:
    """At most 64 of ``records``, evenly spread, the last among them."""
    count = min(len(records), _MOST_STEPS)
    return [records[(number + 1) * len(records) // count - 1] for number in range(count)]
