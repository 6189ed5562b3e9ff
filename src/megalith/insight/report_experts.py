"""Heat maps of expert loads: all layers at the last record, and the layer with the worst balance over time.

A cell for several adjacent experts has the shade of their mean, and along its lower edge that of the least loaded one,
so that a dead expert is visible among busy ones.
"""

from collections.abc import Mapping, Sequence
from html import escape

from megalith.insight.report_parts import card, legend
from megalith.insight.run_history import LayerLoads, RunHistory

__all__ = ["expert_loads"]

# (upper limit of the load relative to the mean, CSS class, name in the legend)
_SHADES = (
    (0.0005, "load-none", "no tokens"),
    (0.5, "load-low", "under 0.5x the mean"),
    (0.9, "load-less", "0.5x to 0.9x"),
    (1.1, "load-even", "0.9x to 1.1x"),
    (2.0, "load-more", "1.1x to 2x"),
    (4.0, "load-high", "2x to 4x"),
    (float("inf"), "load-most", "over 4x"),
)
_WINDOWS = {"wide": 1020, "medium": 640, "narrow": 350}  # pixels, by window width
_ROW, _LEFT, _BELOW = 16, 56, 22  # pixels: the height of a row, and the space for labels
_EDGE = 5  # pixels: the height of the least loaded expert's shade in a cell of several experts
_MOST_STEPS = 64  # columns over time

Cell = tuple[float, float | None]  # mean load, and minimum load if the cell is for several experts


def expert_loads(run: RunHistory) -> str:
    """The card with expert loads; "" for a run without experts."""
    if not run.expert_loads:
        return ""
    step, last = run.expert_loads[-1]
    worst = max(last, key=lambda layer: last[layer].greatest)
    merged = any(loads.least is not None for loads in last.values())
    by_layer = _in_windows(
        f"Expert loads in {len(last)} layers at step {step:,}; the highest is {last[worst].greatest:.2f} times the "
        f"mean, in layer {worst}",
        {f"layer {layer}": _cells(loads) for layer, loads in last.items()},
        ("range" if merged else "expert", *map(str, range(max(len(loads.means) for loads in last.values())))),
    )
    kept = _thinned([(at, _cells(loads[worst])) for at, loads in run.expert_loads if worst in loads])
    num_experts = min(len(cells) for _, cells in kept)
    over_time = _in_windows(
        f"Expert loads in layer {worst} from step {kept[0][0]:,} to {kept[-1][0]:,}",
        {f"{number}": [cells[number] for _, cells in kept] for number in range(num_experts)},
        ("step", *(f"{at:,}" for at, _ in kept)),
    )
    note = f"tokens per expert relative to the layer's mean, at step {step:,}"
    if merged:
        note += "; a cell for several experts shows their mean, and the least loaded one along its lower edge"
    return card(
        "Expert loads",
        note,
        legend((kind, name) for _, kind, name in _SHADES)
        + by_layer
        + f"<h3>Layer {worst}, the least balanced, by step</h3>"
        + over_time,
    )


def _cells(loads: LayerLoads) -> list[Cell]:
    least: list[float] | list[None] = [None] * len(loads.means) if loads.least is None else loads.least
    return list(zip(loads.means, least, strict=True))


def _in_windows(describe: str, rows: Mapping[str, Sequence[Cell]], columns: Sequence[str]) -> str:
    """The heat map once for each window width, of which the page shows one."""
    return "".join(
        f'<div class="{window}">{_svg(describe, rows, columns, width)}</div>' for window, width in _WINDOWS.items()
    )


def _svg(describe: str, rows: Mapping[str, Sequence[Cell]], columns: Sequence[str], width: int) -> str:
    """Draws ``rows`` by name, the first on top; ``columns``: title of the axis, then names. One path per shade."""
    axis, *names = columns
    cell = (width - _LEFT) / len(names)
    paths: dict[str, list[str]] = {}
    for number, cells in enumerate(rows.values()):
        for column, (mean, least) in enumerate(cells):
            height = _ROW - 1 if least is None else _ROW - 1 - _EDGE
            for load, top, part in ((mean, 0, height), (least, height, _EDGE)):
                if load is not None:
                    shade = next(kind for limit, kind, _ in _SHADES if load < limit)
                    paths.setdefault(shade, []).append(
                        f"M{_LEFT + column * cell:.1f} {number * _ROW + top}h{cell - 1:.1f}v{part}h-{cell - 1:.1f}z"
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


def _thinned(records: list[tuple[int, list[Cell]]]) -> list[tuple[int, list[Cell]]]:
    """At most 64 of ``records``, evenly spread, including the last."""
    count = min(len(records), _MOST_STEPS)
    return [records[(number + 1) * len(records) // count - 1] for number in range(count)]
