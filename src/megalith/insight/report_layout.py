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
    drawn, and the others are counted.
    """
    sizes = {axis: int(size) for axis, size in re.findall(r"\b(tp|cp|dp)([1-9]\d*)\b", layout)}
    if not {"tp", "dp"} <= sizes.keys():
        return ""
    cp = sizes.get("cp", 1)
    grid = RankGrid(sizes["tp"] * cp * sizes["dp"], tensor=sizes["tp"], context=cp)
    rows = [row[:_MOST_COLUMNS] for row in grid.groups("tp")[:_MOST_ROWS]]
    boxes = [_box(rank, grid) for row in rows for rank in row]
    width = len(rows[0]) * (_WIDTH + _GAP) - _GAP
    height = len(rows) * (_HEIGHT + _GAP) - _GAP
    if len(boxes) < grid.world_size:
        height += 24
        boxes.append(
            f'<text class="rest" x="0" y="{height - 4}">and {grid.world_size - len(boxes):,} more ranks</text>'
        )
    of_context = f", context parallel {cp}" if cp > 1 else ""
    label = f"{grid.world_size} ranks: tensor parallel {sizes['tp']}{of_context}, data parallel {sizes['dp']}"
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
