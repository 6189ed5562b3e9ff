"""Every kernel, compiled with no GPU for each target as its operation would launch it: registers, spills, memory."""

from pathlib import Path

import pytest
import torch
import triton

from tests.fusions.harness import first_of_each_operation
from tests.fusions.kernel_table import SPILL_BUDGET, Report, compile_kernels, page
from tests.kernel_reports import TARGETS, without_interpreter

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def over_budget(report: Report) -> Report:
    return {key: used for key, used in report.items() if used.spilled > SPILL_BUDGET.get(key[0], 0)}


def test_kernels_of_one_case_of_each_operation_compile_and_spill_no_more_than_they_may():
    names = [case.name for case in first_of_each_operation()]
    report = without_interpreter(compile_kernels, names, ("sm_90",), (torch.bfloat16,))
    assert report
    assert over_budget(report) == {}


@pytest.mark.slow
def test_all_kernels_compile_for_every_target_and_take_what_the_page_says():
    report = without_interpreter(compile_kernels, None, tuple(TARGETS))
    assert {target for _, _, target in report} == TARGETS.keys()
    assert over_budget(report) == {}
    assert page(report, triton.__version__) == PAGE.read_text()
