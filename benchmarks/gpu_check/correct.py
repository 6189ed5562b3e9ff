"""Every case of every fused operation on the kernels, against float64."""

import functools

import torch
from torch import Tensor

from benchmarks.restartable import Item, Line
from tests.fusions.harness import Case, Inputs, all_cases

__all__ = ["case_is_right", "items"]

_ROWS = (3, 4099)  # the latter: several rows a program where they are summed, and more tiles than are read together
_SEQUENCES = (3, 64)  # the rows of attention, which share nothing
_DTYPES = (torch.bfloat16, torch.float32)


def items(tiny: bool) -> dict[str, list[Item]]:
    """By the name of a fusion; the arguments of ``case_is_right``. Tiny: the first case of two fusions."""
    device, rows = ("cpu", _ROWS[:1]) if tiny else ("cuda", _ROWS)
    found: dict[str, list[Item]] = {}
    for case in _cases().values():
        if "triton" in case.fusion.paths:
            of_case = _SEQUENCES[: len(rows)] if case.fusion.name == "attention" else rows
            found.setdefault(case.fusion.name, []).append(
                Item(case.name, (case.name, of_case, _width(case, tiny), device))
            )
    return {name: found[name][:1] for name in ("rms_norm", "glu")} if tiny else found


def case_is_right(name: str, num_rows: tuple[int, ...], width: int, device: str) -> Line:
    """How many passes, forward and backward, were as near to float64 as their dtypes allow; raises at the first other.

    A GPU's kernels in bfloat16 and float32; the interpreter, where bfloat16 is not rounded as on a GPU, in float32.
    Among thousands of rows there are some where rounding takes more than is allowed, whoever computes: the kernels may
    then be as far off as plain torch in that dtype, and ``as_far_as_torch`` says of how many results they were.
    """
    case, checked, as_far = _cases()[name], 0, 0
    for rows in num_rows:
        for dtype in _DTYPES if device == "cuda" else _DTYPES[1:]:
            if dtype in case.dtypes:
                as_far += _judge(case, case.make(rows, width, dtype, device))
                checked += 1
    return {"checked": checked, **({"as_far_as_torch": as_far} if as_far else {})}


def _judge(case: Case, inputs: Inputs) -> int:
    """How many results and gradients were beyond what is allowed, and as far off as plain torch; raises where farther.

    No entry may be farther from float64 than twice the worst of plain torch, nor all together than 1.5 times.
    """
    dy = case.upstream(inputs, "triton")
    got, torchs, as_far = case.run(inputs, "triton", dy), None, 0
    want = case.wanted(inputs, got, dy)
    for name, value in got.items():
        try:
            case.assert_result_accurate(name, got, want, inputs)
        except AssertionError as error:
            if not value.is_floating_point() or not torch.equal(value.isfinite(), want[name].isfinite()):
                raise
            torchs = torchs or case.run(inputs, "reference", dy)
            ours, theirs = ((x.double() - want[name]).nan_to_num() for x in (value, torchs[name]))
            entry, whole = (_ratio(ours.norm(p=p), theirs.norm(p=p)) for p in (torch.inf, 2))
            if not (entry <= 2 and whole <= 1.5):  # not within, so that NaN fails
                raise AssertionError(f"{error}, {entry:.2f} times that of plain torch, {whole:.2f} in all") from None
            as_far += 1
    return as_far


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    return ours.item() / max(theirs.item(), torch.finfo(torch.float64).tiny)


def _width(case: Case, tiny: bool) -> int:
    """A width of models, or in the interpreter a narrow one."""
    most = 127 if tiny else 4096
    return max((width for width in case.widths if width <= most), default=min(case.widths))


@functools.cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}
