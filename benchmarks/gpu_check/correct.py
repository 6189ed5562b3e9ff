"""Every case of every fused operation, run on the kernels and compared with float64."""

import functools

import torch
from torch import Tensor

from benchmarks.restartable import Item, Line
from tests.fusions.harness import Case, Inputs, all_cases

__all__ = ["case_is_right", "items"]

_ROWS = (3, 4099)  # 4099: several rows per program where rows are summed, and more tiles than are read at once
_SEQUENCES = (3, 64)  # sequence lengths for attention, whose rows are independent
_DTYPES = (torch.bfloat16, torch.float32)


def items(tiny: bool) -> dict[str, list[Item]]:
    """Arguments of ``case_is_right`` by fusion name. Tiny: the first case of two fusions."""
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
    """Counts forward and backward passes within their dtype's tolerance of float64; raises at the first that is not.

    On a GPU in bfloat16 and float32; in the interpreter, which does not round bfloat16 as a GPU does, in float32.
    Among thousands of rows, rounding exceeds the tolerance in some, whatever the implementation: the kernels may then
    be as far off as plain torch in that dtype, and ``as_far_as_torch`` counts the results for which they are.
    """
    case, checked, as_far = _cases()[name], 0, 0
    for rows in num_rows:
        for dtype in _DTYPES if device == "cuda" else _DTYPES[1:]:
            if dtype in case.dtypes:
                as_far += _judge(case, case.make(rows, width, dtype, device))
                checked += 1
    return {"checked": checked, **({"as_far_as_torch": as_far} if as_far else {})}


def _judge(case: Case, inputs: Inputs) -> int:
    """Counts results and gradients beyond the tolerance but no further off than plain torch; raises for others.

    The maximum error may be at most twice that of plain torch, and the L2 norm of the errors at most 1.5 times.
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
            if not (entry <= 2 and whole <= 1.5):  # "not <=", so that NaN fails
                raise AssertionError(f"{error}, {entry:.2f} times that of plain torch, {whole:.2f} in norm") from None
            as_far += 1
    return as_far


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    return ours.item() / max(theirs.item(), torch.finfo(torch.float64).tiny)


def _width(case: Case, tiny: bool) -> int:
    """A realistic width, or a narrow one for the interpreter."""
    most = 127 if tiny else 4096
    return max((width for width in case.widths if width <= most), default=min(case.widths))


@functools.cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}
