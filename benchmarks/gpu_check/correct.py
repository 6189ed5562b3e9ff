"""Every case of every fused operation on the kernels, against float64."""

import functools

import torch

from benchmarks.restartable import Item, Line
from tests.fusions.harness import Case, all_cases

__all__ = ["case_is_right", "items"]

_ROWS = (3, 4099)  # the latter: several rows a program where they are summed, and more tiles than are read together
_DTYPES = (torch.bfloat16, torch.float32)


def items(tiny: bool) -> dict[str, list[Item]]:
    """By the name of a fusion; the arguments of ``case_is_right``. Tiny: the first case of two fusions."""
    device, rows = ("cpu", _ROWS[:1]) if tiny else ("cuda", _ROWS)
    found: dict[str, list[Item]] = {}
    for case in _cases().values():
        if "triton" in case.fusion.paths:
            found.setdefault(case.fusion.name, []).append(
                Item(case.name, (case.name, rows, _width(case, tiny), device))
            )
    return {name: found[name][:1] for name in ("rms_norm", "glu")} if tiny else found


def case_is_right(name: str, num_rows: tuple[int, ...], width: int, device: str) -> Line:
    """How many passes, forward and backward, were as near to float64 as their dtypes allow; raises at the first other.

    A GPU's kernels in bfloat16 and float32; the interpreter, where bfloat16 is not rounded as on a GPU, in float32.
    """
    case, checked = _cases()[name], 0
    for rows in num_rows:
        for dtype in _DTYPES if device == "cuda" else _DTYPES[1:]:
            if dtype in case.dtypes:
                case.assert_accurate(case.make(rows, width, dtype, device), "triton")
                checked += 1
    return {"checked": checked}


def _width(case: Case, tiny: bool) -> int:
    """A width of models, or in the interpreter a narrow one."""
    most = 127 if tiny else 4096
    return max((width for width in case.widths if width <= most), default=min(case.widths))


@functools.cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}
