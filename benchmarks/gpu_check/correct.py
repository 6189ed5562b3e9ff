"""Every case of every fused operation on the kernels, against float64."""

import functools

import torch
from torch import Tensor

from benchmarks.restartable import Item, Line
from tests.fusions.harness import Case, Inputs, all_cases

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
    Among thousands of rows there are some where rounding takes more than is allowed, whoever computes: the kernels may
    then be as far off as plain torch in that dtype, and ``as_far_as_torch`` says how often they were.
    """
    case, checked, as_far = _cases()[name], 0, 0
    for rows in num_rows:
        for dtype in _DTYPES if device == "cuda" else _DTYPES[1:]:
            if dtype in case.dtypes:
                inputs = case.make(rows, width, dtype, device)
                try:
                    case.assert_accurate(inputs, "triton")
                except AssertionError:
                    _assert_as_near_as_torch(case, inputs)
                    as_far += 1
                checked += 1
    return {"checked": checked, **({"as_far_as_torch": as_far} if as_far else {})}


def _assert_as_near_as_torch(case: Case, inputs: Inputs) -> None:
    """No entry is farther from float64 than twice the worst of plain torch, nor all together than 1.5 times."""
    dy = case.upstream(inputs, "reference")
    got, torchs, want = case.run(inputs, "triton", dy), case.run(inputs, "reference", dy), case.expected(inputs, dy)
    for name, value in got.items():
        if not value.is_floating_point():
            assert torch.equal(value, want[name].to(value.dtype)), f"{case.name}: {name}"
            continue
        ours, theirs = ((x.double() - want[name]).nan_to_num() for x in (value, torchs[name]))
        assert torch.equal(value.isfinite(), want[name].isfinite()), f"{case.name}: {name}: NaN or inf"
        entry, all_of_them = (_ratio(ours.norm(p=p), theirs.norm(p=p)) for p in (torch.inf, 2))
        said = f"{case.name}: {name}: {entry:.2f} times as far as plain torch in an entry, {all_of_them:.2f} in all"
        assert entry <= 2, said
        assert all_of_them <= 1.5, said


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    return ours.item() / max(theirs.item(), torch.finfo(torch.float64).tiny)


def _width(case: Case, tiny: bool) -> int:
    """A width of models, or in the interpreter a narrow one."""
    most = 127 if tiny else 4096
    return max((width for width in case.widths if width <= most), default=min(case.widths))


@functools.cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}
