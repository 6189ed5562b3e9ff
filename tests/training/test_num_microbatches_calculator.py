"""Micro-batches of a step: constant, ramps with Megatron's numbers, step schedules; every stage checked up front."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.config import BatchSizeStage, load_run, parse_batch_size_schedule
from megalith.errors import ConfigError
from megalith.training.num_microbatches_calculator import (
    NumMicroBatchesCalculator,
    build_num_microbatches_calculator,
    rampup_stages,
)


def test_a_constant_batch_is_divided_among_ranks():
    calculator = NumMicroBatchesCalculator([BatchSizeStage(0, 32)], 2, 4)
    assert [calculator.num_microbatches(consumed) for consumed in (0, 32, 10**12)] == [4, 4, 4]


def test_a_ramp_has_megatrons_numbers():
    calculator = NumMicroBatchesCalculator(rampup_stages(8, 8, 300, 32), 2, 2)
    by_consumed = {0: 8, 99: 8, 100: 16, 199: 16, 200: 24, 299: 24, 300: 32, 301: 32, 10_000: 32}
    assert {consumed: calculator.global_batch_size(consumed) for consumed in by_consumed} == by_consumed
    assert [calculator.num_microbatches(consumed) for consumed in (0, 100, 200, 300)] == [2, 4, 6, 8]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 6), st.integers(1, 1000), st.data())
def test_a_ramp_is_megatrons_formula_in_exact_arithmetic(start, increment, steps, samples, data):
    stages = rampup_stages(start, increment, samples, start + steps * increment)
    calculator = NumMicroBatchesCalculator(stages, 1, 1)
    consumed = data.draw(st.integers(0, samples))
    # start + int(consumed / (samples / steps)) * increment
    assert calculator.global_batch_size(consumed) == start + consumed * steps // samples * increment
    assert calculator.global_batch_size(samples + 1) == start + steps * increment


@pytest.mark.parametrize("ramp", [(8, 8, 0, 32), (32, 8, 300, 32)])
def test_a_ramp_without_length_or_height_is_constant(ramp):
    assert rampup_stages(*ramp) == (BatchSizeStage(0, 32),)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((0, 8, 300, 32), "start >= 1"),
        ((8, 0, 300, 32), "increment >= 1"),
        ((8, 8, -1, 32), "samples >= 0"),
        ((40, 8, 300, 32), r"global_batch_size \(32\) must be start \(40\) plus .* use 40"),
        ((8, 5, 300, 32), r"multiple of increment \(5\); use 28"),
    ],
)
def test_ramps_that_cannot_be_climbed_are_refused(ramp, message):
    with pytest.raises(ConfigError, match=message):
        rampup_stages(*ramp)


def test_a_schedule_in_samples_or_in_tokens_changes_at_its_thresholds():
    by_samples = NumMicroBatchesCalculator(parse_batch_size_schedule("0:16 10K:32 1M:64"), 4, 2)
    consumed = (0, 9_999, 10_000, 999_999, 1_000_000)
    assert [by_samples.global_batch_size(n) for n in consumed] == [16, 16, 32, 32, 64]
    by_tokens = NumMicroBatchesCalculator(parse_batch_size_schedule("0:16 10K:32", seq_length=1000), 4, 2)
    assert [by_tokens.num_microbatches(n) for n in (0, 9, 10, 11)] == [2, 2, 4, 4]


def test_every_stage_is_checked_when_the_calculator_is_made():
    stages = parse_batch_size_schedule("0:16 10K:36 1M:2")
    with pytest.raises(
        ConfigError, match=r"sizes \[36, 2\] must be .* \(4\) x data-parallel ranks \(2\); use \[40, 8\]"
    ):
        NumMicroBatchesCalculator(stages, 4, 2)


@pytest.mark.parametrize(
    ("stages", "micro", "ranks", "message"),
    [
        ([], 1, 1, "must begin at sample 0"),
        ([BatchSizeStage(5, 8)], 1, 1, r"they begin at \[5\]"),
        ([BatchSizeStage(0, 8), BatchSizeStage(0, 16)], 1, 1, r"they begin at \[0, 0\]"),
        ([BatchSizeStage(0, 0)], 1, 1, "must be positive multiples"),
        ([BatchSizeStage(0, 8)], 0, 1, "must be at least 1; got 0 and 1"),
        ([BatchSizeStage(0, 8)], 1, 0, "must be at least 1; got 1 and 0"),
    ],
)
def test_what_gives_no_whole_micro_batches_is_refused(stages, micro, ranks, message):
    with pytest.raises(ConfigError, match=message):
        NumMicroBatchesCalculator(stages, micro, ranks)
    with pytest.raises(ConfigError, match="consumed_samples must be at least 0"):
        NumMicroBatchesCalculator([BatchSizeStage(0, 8)], 1, 1).global_batch_size(-1)


def test_a_run_resumed_in_the_middle_of_a_ramp_takes_the_same_batches():
    calculator = NumMicroBatchesCalculator(rampup_stages(8, 8, 300, 32), 2, 2)

    def batches(consumed: int, steps: int) -> list[int]:
        taken = []
        for _ in range(steps):
            taken.append(calculator.global_batch_size(consumed))
            consumed += taken[-1]
        return taken

    whole = batches(0, 40)
    for stop in range(40):
        assert whole[:stop] + batches(sum(whole[:stop]), 40 - stop) == whole


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=5), st.integers(0, 60))
def test_the_samples_of_the_first_steps_are_counted_without_taking_them(gaps, num_steps):
    stages, first = [BatchSizeStage(0, 7)], 0
    for gap, batch in gaps:
        first += gap
        stages.append(BatchSizeStage(first, batch))
    calculator, consumed = NumMicroBatchesCalculator(stages, 1, 1), 0
    for _ in range(num_steps):
        consumed += calculator.global_batch_size(consumed)
    assert calculator.consumed_after(num_steps) == consumed


def test_the_calculator_of_a_run_follows_its_settings():
    constant = build_num_microbatches_calculator(load_run("llama-4m"), 2)
    assert (constant.global_batch_size(0), constant.num_microbatches(0)) == (16, 4)
    schedule = ["train.global_batch_size=null", "train.batch_size_schedule=0:16 256K:32"]
    in_tokens = load_run("llama-4m", [*schedule, "train.batch_size_schedule_unit=tokens"])
    calculator = build_num_microbatches_calculator(in_tokens, 2)
    assert [calculator.global_batch_size(n) for n in (0, 999, 1000)] == [16, 16, 32]  # 256 tokens per sample
