"""Every kernel, compiled with no GPU for each target as its operation would launch it: registers, spills, memory."""

import pytest
import torch

from tests.fusions.harness import all_cases, first_of_each_operation
from tests.kernel_reports import TARGETS, Resources, compile_for, launches, without_interpreter

# bytes a thread may spill (registers on AMD), by kernel; one that is not listed may spill nothing
SPILL_BUDGET: dict[str, int] = {}
DTYPES = (torch.bfloat16, torch.float32)


def compile_kernels(only_first: bool, targets: tuple[str, ...]) -> dict[tuple[str, str, str], Resources]:
    """What each kernel takes at most, by its name, dtype and target; runs where kernels are born compiled."""
    report: dict[tuple[str, str, str], Resources] = {}
    for case in first_of_each_operation() if only_first else all_cases():
        if "triton" not in case.fusion.paths:
            continue
        for dtype in (dtype for dtype in DTYPES if dtype in case.dtypes):
            inputs = case.make(64, max(width for width in case.widths if width <= 4096), dtype, "cpu")
            for launch in launches(lambda: case.run(inputs, "triton", case.upstream(inputs, "triton"))):  # noqa: B023
                name = f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"
                for target in targets:
                    key = (name, str(dtype).removeprefix("torch."), target)
                    used = compile_for(launch, TARGETS[target])
                    worst = report.get(key, used)
                    report[key] = Resources(*(max(pair) for pair in zip(used, worst, strict=True)))
    return report


@pytest.mark.parametrize(
    ("only_first", "targets"),
    [(True, ("sm_90",)), pytest.param(False, tuple(TARGETS), marks=pytest.mark.slow)],
    ids=["one case of each operation for sm_90", "every case for every target"],
)
def test_kernels_compile_ahead_of_time_and_spill_no_more_than_they_may(only_first, targets):
    report = without_interpreter(compile_kernels, only_first, targets)
    assert {target for _, _, target in report} == set(targets)
    over = {key: used for key, used in report.items() if used.spilled > SPILL_BUDGET.get(key[0], 0)}
    assert over == {}
