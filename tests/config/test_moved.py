"""Setting names of earlier versions: files and command lines that use them give the same run as the current names."""

from pathlib import Path

import pytest

from megalith.config import as_tree, load_run, violations
from megalith.config.moved import MOVED
from megalith.config.settings_tree import FIELDS, applied
from megalith.errors import ConfigError
from tests.config.mistakes import VALID, WSD

PREVIOUS = Path(__file__).parent / "previous_version"
# the same files, written by the previous version, with the current names
TODAY = {
    "gpt2-124m": ("gpt2-124m", ["data.train=x"]),
    "llama-28m": (
        "llama-28m",
        [
            *("data.train=x", "data.valid=y", "model.rope.base=5e5"),
            *("train.evaluation.every=50", "train.evaluation.samples=64"),
        ],
    ),
    "every-optional-part": (
        VALID,
        [
            *("data.valid=held_out", "train.evaluation.every=10", "train.evaluation.samples=5", "model.rope.base=2e4"),
            *("optim.adamw.betas=[0.8, 0.9]", "optim.adamw.eps=1e-6"),
            *("optim.schedule=WSD", "optim.wsd.decay_steps=20", "optim.wsd.decay_style=minus_sqrt"),
            *("optim.weight_decay_ramp.schedule=cosine", "optim.weight_decay_ramp.end=0.3"),
            *("precision.dtype=float16", "precision.loss_scale.initial=1024", "precision.loss_scale.window=500"),
            *("precision.loss_scale.hysteresis=3", "precision.loss_scale.minimum=0.5"),
        ],
    ),
}


@pytest.mark.parametrize("name", TODAY)
def test_a_file_of_the_previous_version_gives_the_same_run(name, caplog):
    source, overrides = TODAY[name]
    config = load_run(PREVIOUS / f"{name}.yaml")
    [record] = caplog.records
    assert "optim.betas is now optim.adamw.betas" in record.getMessage()
    caplog.clear()
    assert config == load_run(source, overrides)
    assert load_run(as_tree(config)) == config
    assert caplog.records == []


def test_every_file_of_the_previous_version_is_read_and_every_old_name_is_in_one():
    assert {path.stem for path in PREVIOUS.iterdir()} == TODAY.keys()
    text = (PREVIOUS / "every-optional-part.yaml").read_text("utf-8")
    assert all(f"  {old.rpartition('.')[2]}: " in text for old in MOVED)


def test_moved_settings_lead_from_names_that_are_gone_to_names_that_are_there():
    assert MOVED.keys().isdisjoint(FIELDS)
    assert set(MOVED.values()) <= FIELDS.keys()


def test_old_overrides_give_the_same_run_and_one_line(caplog):
    old = ["optim.betas=[0.8, 0.9]", "optim.wsd_decay_steps=7", "optim.weight_decay_schedule=constant", "optim.eps="]
    config = load_run(applied(VALID, WSD), old)
    assert [record.getMessage() for record in caplog.records] == [
        "settings have moved: optim.betas is now optim.adamw.betas, optim.eps is now optim.adamw.eps, "
        "optim.weight_decay_schedule is now optim.weight_decay_ramp.schedule, "
        "optim.wsd_decay_steps is now optim.wsd.decay_steps"
    ]
    assert config == load_run(applied(VALID, WSD), ["optim.adamw.betas=[0.8, 0.9]", "optim.wsd.decay_steps=7"])


def test_an_override_stands_over_a_file_whichever_spelling_each_has():
    assert load_run(applied(VALID, {"optim.eps": 1e-7}), ["optim.adamw.eps=1e-6"]).optim.adamw.eps == 1e-6
    assert load_run(applied(VALID, {"optim.adamw.eps": 1e-7}), ["optim.eps=1e-6"]).optim.adamw.eps == 1e-6


def test_both_spellings_at_once_are_refused():
    both = {"model.rotary_base": 1e4, "model.rope.base": 1e4}
    assert violations(applied(VALID, both)) == [
        "model.rotary_base is now model.rope.base, and both are given; remove model.rotary_base"
    ]
    with pytest.raises(ConfigError, match=r"'optim.eps=1': optim.eps is now optim.adamw.eps, and both are given"):
        load_run(VALID, ["optim.eps=1", "optim.adamw.eps=1"])


def test_an_old_name_with_a_wrong_value_is_reported_under_its_new_name():
    with pytest.raises(ConfigError, match=r"optim.adamw.eps must be above 0.*; use optim.adamw.eps=1"):
        load_run(applied(VALID, {"optim.eps": 0}))
    with pytest.raises(ConfigError, match=r"optim.weight_decay_ramp.schedule is missing"):
        load_run(applied(VALID, {"optim.weight_decay_schedule": "constant", "optim.end_weight_decay": 0.2}))


def test_an_old_name_beside_a_value_that_is_no_group_is_not_lost():
    found = violations(applied(VALID, {"model.rope": 5, "model.rotary_base": 1e4}))
    assert [line.partition(";")[0] for line in found] == [
        "model.rope must be a group of settings",
        "model.rotary_base is now model.rope.base, and both are given",
    ]
