"""The benchmark of fused operations: correctness before speed, ratios within rounds, a row for every operation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import driver

from benchmarks.fusions import calls, cost, operation, registry, report
from benchmarks.fusions.clock import Clock, memory_of
from benchmarks.fusions.contest import Contest, Figures, contest
from benchmarks.fusions.launches import launches
from megalith.fusions.core.registry import FUSIONS
from tests.kernel_reports import without_interpreter


def inputs(num_bytes: int, dtype: torch.dtype, device: str) -> operation.Inputs:
    return {"x": torch.randn(num_bytes // dtype.itemsize, device=device).to(dtype)}


def doubled(x: Tensor, backend: str | None = None, factor: float = 2.0) -> Tensor:
    return x * factor


def absent() -> operation.Call:
    raise ImportError("not installed")


@pytest.fixture
def doubling(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    peers = {"wrong": lambda: partial(doubled, factor=2.5), "absent": absent}
    floor = cost.Cost(forward=2048, backward=1024, saved=0)
    return operation.Operation("doubling", "glu", inputs, doubled, doubled, lambda x: floor, peers)


def test_a_contender_that_is_wrong_gets_no_number_and_one_that_is_absent_no_column(doubling):
    result = contest(doubling, 4096, torch.float32, "cpu", rounds=3)
    assert result.figures["wrong"].failure.startswith("wrong: 2.5e-01 from the reference")
    assert result.figures["wrong"].both == {}
    assert "absent" not in result.figures
    assert len(result.figures["Megalith"].both) == len(result.figures["torch eager"].forward) == 3
    table = report.as_markdown([report.Run([result], [1e9])], {"device": "CPU"}, "today")
    assert "| doubling | float32 | 0 |" in table
    assert "wrong: 2.5e-01" in table


def test_ratios_are_formed_within_rounds_and_shares_count_the_floor():
    ours = Figures(forward={0: 1.0, 1: 2.0, 2: 1.0}, both={0: 3.0, 1: 6.0, 2: 3.0})
    eager = Figures(forward={0: 2.0, 1: 4.0, 2: 2.0}, both={0: 3.0, 1: 6.0, 2: 6.0})
    slow = Figures(forward={1: 8.0}, both={1: 12.0})
    contenders = {"Megalith": ours, "slow": slow, "torch eager": eager}
    result = Contest("op", "bfloat16", 1 << 20, (100, 400), contenders)
    assert result.ratio("slow", both=True).median == 0.5
    assert result.ratio("Megalith", both=False).median == 2.0
    assert result.ratio("Megalith", both=True).median == 1.0
    assert result.share("Megalith", bandwidth=1000.0) == (0.1, 0.2)


def test_a_contender_far_behind_runs_in_a_few_rounds_only(doubling, monkeypatch):
    seconds = iter([1.0, 9.0, 1.0])  # ours, the slow one, and eager, before the rounds
    monkeypatch.setattr(Clock, "seconds", lambda *_: next(seconds, 1.0))
    monkeypatch.setattr(
        operation.Operation, "contenders", lambda *_: {"ours": doubled, "slow": doubled, operation.BASE: doubled}
    )
    figures = contest(doubling, 4096, torch.float32, "cpu", rounds=5).figures
    assert [len(figures[name].both) for name in figures] == [5, 3, 5]


@pytest.mark.parametrize("num_calls", [5, 9])  # fails when first timed, and in the rounds
def test_a_contender_that_fails_while_it_is_timed_costs_its_own_numbers_only(num_calls, doubling, monkeypatch):
    called = []

    def failing(x: Tensor) -> Tensor:
        called.append(1)
        if len(called) > num_calls:
            raise torch.OutOfMemoryError("out of memory")
        return doubled(x)

    contenders = {"failing": failing, "Megalith": doubled, operation.BASE: doubled}
    monkeypatch.setattr(operation.Operation, "contenders", lambda *_: contenders)
    monkeypatch.setattr("benchmarks.fusions.contest._repeats", lambda *_: 1)
    result = contest(doubling, 4096, torch.float32, "cpu", rounds=3)
    assert result.figures["failing"].failure == "OutOfMemoryError: out of memory"
    assert result.figures["failing"].both == {}
    assert [len(result.figures[name].both) for name in ("Megalith", operation.BASE)] == [3, 3]
    assert "OutOfMemoryError" in report.as_markdown([report.Run([result], [1e9])], {"device": "CPU"}, "today")


def test_where_torch_eager_fails_nothing_is_said_of_speed(doubling, monkeypatch):
    def failing(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(operation.Operation, "contenders", lambda *_: {"Megalith": doubled, operation.BASE: failing})
    result = contest(doubling, 4096, torch.float32, "cpu", rounds=2)
    assert result.ratio("Megalith", both=True) is None
    assert "torch eager failed" in report.as_markdown([report.Run([result], [1e9])], {"device": "CPU"}, "today")


def test_memory_is_what_is_allocated_and_the_most_at_one_time():
    def work() -> Tensor:
        x = torch.ones(1000, dtype=torch.float64)
        x = x + 1
        return x + 1

    memory = memory_of(work, "cpu")
    assert 24_000 <= memory.allocated < 25_000
    assert 16_000 <= memory.peak < 17_000


def test_a_clock_counts_seconds_of_one_call():
    calls = []
    assert Clock("cpu").seconds(lambda: calls.append(1), repeats=5) >= 0.0
    assert len(calls) == 5


def test_what_a_call_costs_is_told_for_a_norm_a_sum_a_gate_rope_and_attention():
    measured = calls.measure_calls("cpu", rounds=1)
    names = ["rms norm", "add and rms norm", "swiglu", "rope", "attention"]
    titles = ("launching nothing", "training", "decoding")
    public = ["norm", "bias swiglu", "masked softmax", "cross entropy", "rope", "permute"]
    assert list(measured) == [
        *(f"{name}, {what}" for name in names for what in titles),
        *(f"{name}, {path} path" for name in public for path in ("blocked", "default")),
    ]
    assert calls.as_markdown({"a, training": {"Megalith": [3e-6, 4e-6], "torch": [2e-6, 2e-6]}}).splitlines()[-1] == (
        "| a, training | torch | 2 | 1.75 [1.62..1.88] |  |"
    )


def launched_on_no_device() -> tuple[list[str], bool]:
    """What is timed of one operation without the interpreter, and whether Triton's driver is as before."""
    with pytest.MonkeyPatch.context() as patch:
        swiglu = calls._operations("cpu")["swiglu"]
        patch.setattr(calls, "_operations", lambda device: {"swiglu": swiglu})
        patch.setattr(calls, "launches", lambda device: {})
        before = driver._active
        return list(calls.measure_calls("cpu", rounds=1)), driver._active is before


def test_where_kernels_are_compiled_launches_are_timed_without_a_gpu():
    titles = ("launching nothing", "launching on no device", "training", "decoding")
    assert without_interpreter(launched_on_no_device) == ([f"swiglu, {title}" for title in titles], True)


def test_a_public_function_and_its_bases_compute_the_same():
    for name, given in launches("cpu").items():
        for path, base in (("blocked", given.plain), (None, given.formula)):
            want = outputs_and_gradients(base, given.tensors)
            got = outputs_and_gradients(partial(given.ours, backend=path), given.tensors)
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), f"{name}, {path}"


def outputs_and_gradients(compute: Callable[..., Any], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    results = compute(*tensors)
    ys = results if isinstance(results, tuple) else (results,)
    leaves = [x for x in tensors if x.requires_grad]
    return [*ys, *torch.autograd.grad(ys, leaves, [y.detach().cos() for y in ys])]


def test_every_operation_has_a_row_and_every_row_a_name_of_its_own():
    assert len(registry.OPERATIONS) == sum(len(family.OPERATIONS) for family in registry.FAMILIES)
    assert {one.fusion for one in registry.OPERATIONS.values()} == FUSIONS.keys()
