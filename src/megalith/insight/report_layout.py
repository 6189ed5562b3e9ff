"""Draws a layout: one box per rank, with the ranks of a tensor-parallel group side by side."""

import re

from megalith.topology.rank_grid import RankGrid

__all__ = ["layout_svg"]

_WIDTH, _HEIGHT, _GAP = 58, 66, 6  # of a box, in pixels
_MOST_COLUMNS, _MOST_ROWS = 8, 4
_SHADES = 6  # defined by the page's CSS


def layout_svg(layout: str) -> str:
    """The ranks of ``layout`` ("tp2 cp2 dp4") as an ``<svg>`` element; "" if it does not name tp and dp.

    A column, and a shade, is a tensor-parallel coordinate: its ranks hold the same slice of every weight. A row is a
    data-parallel coordinate, and with cp a part of its sequences. For a large world, the first rows and columns are
    drawn, and the others are counted; of a pipeline, the first stage is drawn.
    """
    sizes = {axis: int(size) for axis, size in re.findall(r"\b(tp|cp|pp|dp)([1-9]\d*)\b", layout)}
    if not {"tp", "dp"} <= sizes.keys():
        return ""
    tp, cp, pp, dp = (sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    grid = RankGrid(tp * cp * pp * dp, tensor=tp, context=cp, pipeline=pp)
    rows = [row[:_MOST_COLUMNS] for row in grid.groups("tp")[: min(_MOST_ROWS, cp * dp)]]  # stages come one by one
    boxes = [_box(rank, grid) for row in rows for rank in row]
    left, of_stages = grid.world_size - len(boxes), f", in {pp} pipeline stages" if pp > 1 else ""
    width = len(rows[0]) * (_WIDTH + _GAP) - _GAP
    height = len(rows) * (_HEIGHT + _GAP) - _GAP
    if left:
        height += 24
        boxes.append(f'<text class="rest" x="0" y="{height - 4}">and {left:,} more ranks{of_stages}</text>')
    others = "".join(f", {name} parallel {size}" for name, size in (("context", cp), ("pipeline", pp)) if size > 1)
    label = f"{grid.world_size} ranks: tensor parallel {tp}{others}, data parallel {dp}"
    return (
        f'<svg class="layout" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        f'style="max-width: {width}px">{"".join(boxes)}</svg>'
    )


def _box(rank: int, grid: RankGrid) -> str:
    tp, cp, dp = (grid.position(axis, rank) for axis in ("tp", "cp", "dp"))
    x, y = tp * (_WIDTH + _GAP), grid.position("cp-dp", rank) * (_HEIGHT + _GAP)
    row = f"dp {dp}" if grid.size("cp") == 1 else f"cp {cp} dp {dp}"
    return (
        f'<g transform="translate({x} {y})" class="shade-{tp % _SHADES + 1}">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>'
        f'<text class="rank" x="{_WIDTH / 2:g}" y="22">rank {rank}</text>'
        f'<text x="{_WIDTH / 2:g}" y="39">tp {tp}</text><text x="{_WIDTH / 2:g}" y="54">{row}</text></g>'
    )
