"""loss_scale: Megatron's behaviour, by hand, and its state in checkpoints."""

import pytest

from megalith.optim.loss_scale import DynamicLossScale


def trace(scale: DynamicLossScale, pattern: str) -> list[float]:
    """The scale after each step of ``pattern``: x for an overflow, . for none."""
    scales = []
    for step in pattern:
        scale.update(step == "x")
        scales.append(scale.scale)
    return scales


@pytest.mark.parametrize(
    ("hysteresis", "pattern", "scales"),
    [
        (2, "x.x...", [16, 16, 8, 8, 8, 16]),  # clean steps do not refill the hysteresis
        (2, "......", [16, 16, 32, 32, 32, 64]),
        (2, "xxxx", [16, 8, 4, 2]),  # once spent, each overflow halves
        (2, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),  # growth refills it
        (2, "x...x", [16, 16, 16, 32, 32]),
        (1, "x..x...", [8, 8, 8, 4, 4, 4, 8]),  # the count of steps without overflow restarts
        (3, "xxx", [16, 16, 8]),
    ],
)
def test_the_scale_follows_its_trace(hysteresis, pattern, scales):
    assert trace(DynamicLossScale(16.0, window=3, hysteresis=hysteresis), pattern) == scales


def test_the_scale_stops_at_its_smallest():
    assert trace(DynamicLossScale(4.0, window=3, hysteresis=1, smallest=2.0), "xxx...") == [2, 2, 2, 2, 2, 4]


def test_a_scale_that_resumes_with_a_smaller_window_grows_at_once():
    scale = DynamicLossScale(16.0, window=3, hysteresis=2)
    scale.load_state_dict({"scale": 16.0, "clean_steps": 50, "borne": 1})
    assert trace(scale, "....") == [32, 32, 32, 64]


def test_a_scale_continues_from_its_state():
    pattern, states = "x..xx...x.x....", []
    whole = DynamicLossScale(2.0**16, window=3, hysteresis=2)
    for _ in pattern:
        states.append(whole.state_dict())
        whole.update(pattern[len(states) - 1] == "x")
    for done, state in enumerate(states):
        resumed = DynamicLossScale(1.0, window=3, hysteresis=2)
        resumed.load_state_dict(state)
        trace(resumed, pattern[done:])
        assert resumed == whole
