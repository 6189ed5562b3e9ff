"""Learning rate and weight decay: Megatron's numbers, boundaries, groups of their own, and loading a state."""

import logging
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.config import OptimConfig, WeightDecayRampConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.optim.optimizer_param_scheduler import (
    LearningRateSchedule,
    OptimizerParamScheduler,
    WeightDecaySchedule,
    lr,
    weight_decay,
)

STYLES = ("linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAYS = ("linear", "cosine", "exponential", "minus_sqrt")
ARGUMENTS = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "cosine",
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "cosine",
    "wsd_decay_steps": 40,
    "lr_wsd_decay_style": "linear",
}


class Optimizer:
    """The part of an optimizer that a scheduler needs."""

    def __init__(self, *groups: dict) -> None:
        self.param_groups = list(groups or ({},))


def scheduler(*groups: dict, **changes) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(Optimizer(*groups), **ARGUMENTS | changes)


def rates(s: OptimizerParamScheduler) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in s.optimizer.param_groups]


def at(n: int, style: str, wsd_decay: str = "linear") -> float:
    """The learning rate that a scheduler sets after n steps: peak 1, minimum 0.1, warm-up 10, end 110, WSD 40."""
    s = scheduler(lr_decay_style=style, lr_wsd_decay_style=wsd_decay)
    s.step(n)
    assert s.lr == rates(s)[0][0]
    return s.lr


# values produced by Megatron's own scheduler
@pytest.mark.parametrize(
    ("style", "values"),
    [
        ("linear", {0: 0.0, 5: 0.5, 10: 1.0, 35: 0.775, 60: 0.55, 85: 0.325, 110: 0.1, 111: 0.1}),
        ("cosine", {0: 0.0, 5: 0.5, 10: 1.0, 35: 0.868198, 60: 0.55, 85: 0.231802, 110: 0.1, 111: 0.1}),
        ("inverse-square-root", {5: 0.5, 10: 1.0, 35: 0.534522, 60: 0.408248, 110: 0.301511, 111: 0.1}),
        ("constant", {0: 0.0, 5: 0.5, 10: 1.0, 11: 1.0, 110: 1.0, 111: 1.0, 10_000: 1.0}),
        ("WSD", {0: 0.0, 5: 0.5, 10: 1.0, 11: 1.0, 69: 1.0, 70: 1.0, 111: 0.1}),
    ],
)
def test_learning_rates_are_megatrons(style, values):
    assert {n: at(n, style) for n in values} == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(
    ("decay", "values"),
    [
        ("linear", {70: 1.0, 80: 0.775, 90: 0.55, 100: 0.325, 110: 0.1}),
        ("cosine", {70: 1.0, 80: 0.868198, 90: 0.55, 100: 0.231802, 110: 0.1}),
        ("exponential", {70: 1.0, 80: 0.713614, 90: 0.472792, 100: 0.270286, 110: 0.1}),
        ("minus_sqrt", {70: 1.0, 80: 0.55, 90: 0.363604, 100: 0.220577, 110: 0.1}),
    ],
)
def test_the_four_decays_of_wsd_are_megatrons(decay, values):
    assert {n: at(n, "WSD", decay) for n in values} == pytest.approx(values, abs=1e-6)


def test_the_step_after_warmup_begins_the_decay():
    by_hand = {"linear": 0.1 + 0.9 * 0.99, "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi / 100))}
    assert {style: at(11, style) for style in by_hand} == pytest.approx(by_hand, abs=1e-12)
    assert at(11, "inverse-square-root") == pytest.approx(math.sqrt(10 / 11), abs=1e-12)


@pytest.mark.parametrize(
    ("style", "values"),
    [
        ("cosine", {0: 0.0, 35: 0.0273005, 60: 0.0654508, 85: 0.0945503, 100: 0.1, 101: 0.1}),
        ("linear", {0: 0.0, 35: 0.035, 60: 0.06, 85: 0.085, 100: 0.1, 101: 0.1}),
    ],
)
def test_weight_decay_ramps_as_megatrons(style, values):
    schedule = WeightDecaySchedule(0.0, 0.1, style, 100)
    assert {n: weight_decay(n, schedule) for n in values} == pytest.approx(values, abs=1e-6)


def test_weight_decay_may_fall_and_may_stay():
    assert weight_decay(25, WeightDecaySchedule(0.4, 0.0, "linear", 100)) == pytest.approx(0.3)
    assert weight_decay(25, WeightDecaySchedule(0.4, 0.4)) == 0.4


def test_without_warmup_the_first_step_is_at_the_peak():
    schedule = LearningRateSchedule(1.0, 0.1, decay_steps=100, style="cosine")
    assert lr(0, schedule) == 1.0
    assert lr(0, LearningRateSchedule(1.0, style="inverse-square-root")) == 1.0


def test_an_inverse_square_root_without_an_end_never_jumps():
    schedule = LearningRateSchedule(1.0, 0.1, warmup_steps=10, style="inverse-square-root")
    curve = [lr(n, schedule) for n in range(10, 2000)]
    assert max(a - b for a, b in pairwise(curve)) < 0.05
    assert curve[-1] == 0.1  # sqrt(10 / 1999) is below it


@given(
    style=st.sampled_from(STYLES),
    wsd_decay=st.sampled_from(WSD_DECAYS),
    warmup=st.integers(0, 50),
    stable=st.integers(0, 50),
    decay=st.integers(1, 50),
    peak=st.floats(1e-5, 1.0),
    floor=st.floats(0.0, 1.0),
)
def test_rates_rise_to_the_peak_and_then_never_again(style, wsd_decay, warmup, stable, decay, peak, floor):
    end = warmup + stable + decay
    schedule = LearningRateSchedule(peak, floor * peak, 0.0, warmup, end, style, decay, wsd_decay)
    curve = [lr(n, schedule) for n in range(end + 3)]
    slack = 1e-12 * peak
    assert all(a <= b + slack for a, b in pairwise(curve[: warmup + 1]))
    falling = curve[warmup:]
    assert all(a >= b - slack for a, b in pairwise(falling))
    assert all(floor * peak - slack <= rate <= peak + slack for rate in falling)


def test_construction_writes_both_rates_into_every_group():
    s = scheduler({}, {"wd_mult": 0.0}, init_lr=0.5, start_wd=0.05)
    assert rates(s) == [(0.5, 0.05), (0.5, 0.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_lr": -0.1}, r"min_lr \(-0.1\) must be from 0 to max_lr"),
        ({"min_lr": 2.0}, r"min_lr \(2.0\) must be from 0 to max_lr \(1.0\)"),
        ({"max_lr": math.nan}, r"must be from 0 to max_lr \(nan\)"),
        ({"init_lr": 1.5}, r"init_lr \(1.5\)"),
        ({"lr_decay_steps": 0}, r"lr_warmup_steps \(10\) must be at least 0 and below lr_decay_steps \(0\)"),
        ({"lr_warmup_steps": 110}, r"lr_warmup_steps \(110\)"),
        ({"lr_warmup_steps": -1}, r"lr_warmup_steps \(-1\)"),
        ({"lr_decay_steps": None}, r"lr_decay_steps must be set with"),
        ({"lr_decay_style": "cosin"}, r"lr_decay_style must be one of constant, .*; got 'cosin'"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": None}, r"wsd_decay_steps must be from 1 to 100"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 101}, r"wsd_decay_steps must be from 1 to 100.*got 101"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": None}, r"lr_wsd_decay_style must be one of linear"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "sqrt"}, r"lr_wsd_decay_style .* got 'sqrt'"),
        ({"start_wd": -0.1}, r"start_wd \(-0.1\)"),
        ({"end_wd": math.nan}, r"end_wd \(nan\)"),
        ({"wd_incr_style": "constant"}, r"must be equal with wd_incr_style='constant'"),
        ({"wd_incr_style": "cube"}, r"wd_incr_style must be one of constant, linear, cosine; got 'cube'"),
        ({"wd_incr_steps": 0}, r"wd_incr_steps must be at least 1"),
        ({"override_opt_param_scheduler": True}, r"are mutually exclusive"),
        ({"min_lr": 2.0, "lr_warmup_steps": 200}, r"min_lr \(2.0\).*lr_warmup_steps \(200\)"),  # both at once
    ],
)
def test_constants_that_do_not_fit_are_refused_at_construction(changes, message):
    with pytest.raises(ConfigError, match=message):
        scheduler(**changes)


def test_a_group_whose_own_constants_do_not_fit_is_refused_at_construction():
    with pytest.raises(ConfigError, match=r"min_lr \(0.1\) must be from 0 to max_lr \(0.01\)"):
        scheduler({}, {"max_lr": 0.01})
    with pytest.raises(ConfigError, match="must be equal"):
        scheduler({"start_wd": 0.05}, start_wd=0.1, wd_incr_style="constant")
    with pytest.raises(ConfigError, match="increment must be at least 0"):
        scheduler().step(-1)


def test_a_group_with_half_the_peak_has_half_the_rate_and_others_keep_theirs():
    s = scheduler({}, {"max_lr": 0.5, "min_lr": 0.05}, {"wd_mult": 2.0, "end_wd": 0.2}, init_lr=0.2)
    for _ in range(12):
        (first, decay), (half, same_decay), (same, other_decay) = rates(s)
        assert half == pytest.approx(first / 2)
        assert (same, same_decay) == (first, decay)
        assert other_decay == pytest.approx(4 * decay)
        s.step(10)


def test_warmup_of_a_group_with_a_low_peak_never_falls():
    s = scheduler({"max_lr": 0.15}, init_lr=0.5)
    warmup = [rates(s)[0][0]]
    for _ in range(10):
        s.step(1)
        warmup.append(rates(s)[0][0])
    assert warmup == sorted(warmup)
    assert warmup[-1] == pytest.approx(0.15)


@pytest.mark.parametrize(
    "policy", [{}, {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}]
)
@pytest.mark.parametrize("style", STYLES)
def test_a_loaded_scheduler_goes_on_as_if_it_had_not_stopped(style, policy):
    whole, first = scheduler(lr_decay_style=style), scheduler(lr_decay_style=style)
    whole.step(50), first.step(50)
    second = scheduler({}, lr_decay_style=style, **policy)
    state = first.state_dict()
    for _ in range(2):  # loading sets the position instead of adding to it
        second.load_state_dict(state)
        assert (second.num_steps, rates(second)) == (50, rates(whole))
    whole.step(37), second.step(37)
    assert rates(second) == rates(whole)
    assert second.state_dict() == whole.state_dict()


def test_the_checkpoints_constants_are_in_both_rates_at_once():
    state = scheduler(end_wd=0.1, wd_incr_style="linear", max_lr=0.5).state_dict() | {"num_steps": 50}
    s = scheduler(end_wd=0.5, wd_incr_style="linear")
    s.load_state_dict(state)
    assert rates(s) == [(pytest.approx(lr(50, s.lr_schedule)), pytest.approx(0.05))]
    assert s.lr_schedule.max_lr == 0.5


def test_wsd_is_saved_whole():
    old = scheduler(lr_decay_style="WSD", wsd_decay_steps=20, lr_wsd_decay_style="minus_sqrt", init_lr=0.3)
    new = scheduler()
    new.load_state_dict(old.state_dict())
    assert new.lr_schedule == old.lr_schedule


def test_overriding_keeps_the_given_constants_and_says_what_changed(caplog):
    s = scheduler(use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    with caplog.at_level(logging.DEBUG):
        s.load_state_dict(scheduler(max_lr=0.5).state_dict() | {"num_steps": 10})
    assert s.lr == 1.0
    assert "max_lr 1.0 (loaded: 0.5)" in caplog.text


def test_with_neither_policy_other_constants_are_refused_and_equal_ones_taken():
    s = scheduler(use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(ConfigError, match=r"max_lr 1.0 \(loaded: 0.5\), wsd_decay_steps 40 \(loaded: 30\)"):
        s.load_state_dict(scheduler(max_lr=0.5, wsd_decay_steps=30).state_dict())
    assert s.num_steps == 0
    s.load_state_dict(scheduler().state_dict() | {"num_steps": 60})
    assert s.lr == pytest.approx(0.55)


def test_states_of_megatron_are_read_also_old_ones():
    old = {
        "start_lr": 0.5,
        "warmup_iter": 20,
        "end_iter": 220,
        "decay_style": "linear",
        "num_iters": 120,
        "min_lr": 0.0,
    }
    s = scheduler()
    s.load_state_dict(old)
    assert s.lr == pytest.approx(0.25)
    assert s.wd_schedule.end_wd == 0.1


def test_a_state_of_another_unit_or_without_a_position_is_refused():
    with pytest.raises(CheckpointError, match="this scheduler counts steps, but the loaded state counts samples"):
        scheduler().load_state_dict(scheduler(unit="samples").state_dict())
    with pytest.raises(CheckpointError, match=r"scheduler\.num_steps must be an integer .*; it is missing"):
        scheduler().load_state_dict({"max_lr": 1.0})


def test_a_torch_optimizer_follows_and_a_tensor_rate_is_filled_in_place():
    captured = torch.tensor(0.0)
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": parameters[:1], "lr": captured}, {"params": parameters[1:], "wd_mult": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, foreach=False)
    s = OptimizerParamScheduler(optimizer, **ARGUMENTS)
    s.step(5)
    assert optimizer.param_groups[0]["lr"] is captured
    assert captured.item() == 0.5
    assert (optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]) == (0.5, 0.0)


def test_the_rates_of_a_run_are_its_settings():
    config = OptimConfig(lr=0.5, min_lr=0.1, warmup_steps=10, decay_steps=110, weight_decay=0.2)
    s = OptimizerParamScheduler.from_config(Optimizer({}), config, steps=200)
    s.step(60)
    assert rates(s) == [(pytest.approx(0.3), 0.2)]
    ramp = config.model_copy(update={"weight_decay_ramp": WeightDecayRampConfig(schedule="linear", end=0.4)})
    s = OptimizerParamScheduler.from_config(Optimizer({}), ramp, steps=200)
    s.step(100)
    assert rates(s)[0][1] == pytest.approx(0.3)
