"""Formats a verification as text: what was run, a row for each small run, what could not be shown, the verdict."""

from collections.abc import Iterator

from megalith.insight.verify.compare import BOUNDS
from megalith.insight.verify.cover import name_of, num_ranks
from megalith.insight.verify.proof import Result
from megalith.insight.verify.record import Key
from megalith.insight.verify.verification import Verification
from megalith.observe.units import duration

__all__ = ["as_text"]

_HEAD = ("ranks", "layout", "dtype", "paths", "time", "largest difference from one process", "error", "bound", "")


def as_text(found: Verification) -> str:
    """The verification as lines of text."""
    rows = [_HEAD, *map(_row, found.results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join(
        [
            f"recipe       {name_of(found.layout)}",
            f"small model  {found.small}",
            "",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            "",
            *(["not covered:", *(f"  {line}" for line in found.uncovered), ""] if found.uncovered else []),
            *_verdict(found),
        ]
    )


def _row(result: Result) -> tuple[str, ...]:
    case = result.case
    paths = case.paths if case.paths == "reference" else ", ".join(sorted(result.taken)) or case.paths
    what = "did not finish" if result.worst is None else _said(result.worst)
    return (
        str(num_ranks(case.degrees)),
        name_of(case.degrees),
        case.dtype,
        paths,
        duration(result.seconds),
        what,
        "" if result.worst is None else f"{result.error:.1e}",
        f"{BOUNDS[case.dtype].error:.0e}",
        "same" if result.same else "FAILED" if result.failure else "DIFFERS",
    )


def _verdict(found: Verification) -> Iterator[str]:
    fault = found.fault
    if fault is None:
        compared = "loss, every gradient, gradient norm, and weights after two steps"
        yield f"all {len(found.results)} runs match: {compared}"
        return
    case, num_wrong = fault.case, sum(not result.same for result in found.results)
    are = "is" if num_wrong == 1 else "are"
    yield f"{num_wrong} of {len(found.results)} runs {are} wrong; smallest failing layout: {name_of(case.degrees)}"
    if fault.failure is not None:
        yield f"in {case.dtype}: {fault.failure}"
    elif fault.first is not None:
        key, error = fault.first
        allowed = f"{BOUNDS[case.dtype].error:.0e} is allowed"
        yield f"first difference, in {case.dtype}: {_said(key)}, by {error:.1e}; {allowed}"


def _said(key: Key) -> str:
    """The entry in words, such as "the gradient of lm_head.weight in step 1"."""
    if key.kind == "weight":
        return f"{key.name} after step {key.step}" if key.step else f"{key.name} at the start"
    return f"{'the gradient of ' if key.kind == 'gradient' else ''}{key.name} in step {key.step}"
