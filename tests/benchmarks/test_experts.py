"""benchmarks/experts at its tiny size: all contenders pass the check, and a token sent to the wrong expert fails it."""

import pytest

from benchmarks.experts import TOLERANCE
from benchmarks.measure import measure
from benchmarks.registry import CASES

MEGATRON = "Megatron-Core, SequentialMLP"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ours_and_theirs_give_the_gradients_of_the_reference(dtype, tmp_path):
    case = CASES[f"experts-8-top2-{str(dtype).removeprefix('torch.')}"]
    size = case.sizes["quick"]
    case.prepare(size, tmp_path)
    for name in case.contenders.keys() - {MEGATRON}:
        assert case.verdict(name, case.contenders[name].build(size, tmp_path).first()) is None, name


@pytest.mark.slow  # it compiles its activation
def test_megatron_core_gives_the_gradients_of_the_reference():
    measurement = measure("experts-64-top8-float32", "quick", 1, [MEGATRON])
    assert measurement.entries[MEGATRON].failure is None


def test_tokens_that_go_to_the_next_expert_are_found_out(tmp_path):
    case = CASES["experts-8-top2-float32"]
    size = case.sizes["quick"]
    case.prepare(size, tmp_path)
    runner = case.contenders["Megalith"].build(size, tmp_path)
    gate = runner._model.gate.weight
    gate.data = gate.roll(1, dims=0)
    assert "wrong" in case.verdict("Megalith", runner.first())
