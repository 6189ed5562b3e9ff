"""Every rule is violated once on purpose: the report names that rule and no other."""

import re

import pytest

from megalith.config import load_run, violations
from megalith.config.dotted import parent
from megalith.config.field_errors import field_violations
from megalith.config.relevance import CONDITIONS
from megalith.config.rules import RUN_RULES, broken
from megalith.config.settings_tree import FIELDS, GROUPS, applied, draft_of, plain_tree
from megalith.errors import ConfigError
from tests.config.mistakes import LEARNED, MISTAKES, SGD, VALID, WSD


def test_the_run_that_mistakes_are_made_in_is_valid():
    assert violations(VALID) == violations(VALID, world_size=4) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_reported_alone_and_with_a_way_out(mistake):
    found = violations(applied(VALID, mistake.changes), mistake.world_size)
    assert re.search(mistake.message, found[0]), found
    assert len(found) == 1 + mistake.also, found


def test_every_rule_is_broken_by_some_mistake():
    seen = set()
    for mistake in MISTAKES:
        tree = plain_tree(applied(VALID, mistake.changes))
        _, malformed = field_violations(tree)
        seen.update(violation.rule for violation in broken(draft_of(tree, malformed, mistake.world_size)))
    assert {rule.__name__ for rule in RUN_RULES} <= seen


def test_every_condition_is_on_a_field_beside_the_one_that_needs_it():
    for name, condition in CONDITIONS.items():
        assert name in FIELDS.keys() | GROUPS.keys()
        assert condition.setting in FIELDS
        assert parent(condition.setting) == parent(name)


def test_all_mistakes_are_told_at_once():
    tree = applied(
        VALID,
        {
            "train.lr": 1,
            "optim.lr": -1,
            "parallel.tensor": 8,
            "model.num_query_groups": 3,
            "optim.wsd.decay_steps": 5,
            "train.evaluation.every": 2,
        },
    )
    with pytest.raises(ConfigError) as error:
        load_run(tree, world_size=8)
    lines = str(error.value).split("\n")
    assert lines[0] == "6 settings are invalid:"
    for name in (
        "train.lr",
        "optim.lr",
        "num_attention_heads",
        "num_query_groups",
        "optim.wsd.decay_steps",
        "train.evaluation",
    ):
        assert sum(line.strip().split(";")[0].count(name) > 0 for line in lines[1:]) >= 1, name


@pytest.mark.parametrize(
    ("changes", "world_size"),
    [
        ({"parallel.tensor": 4, "parallel.sequence": True}, 4),
        ({"parallel.tensor": 2, "parallel.replicate": 2, "parallel.shard": 2}, 8),
        ({"parallel.context": 2, "parallel.context_method": "all_to_all", "parallel.tensor": 2}, 8),
        ({"parallel.context": 4, "parallel.context_method": "two_level", "parallel.context_inner": 2}, 4),
        ({"parallel.tensor": 4, "parallel.sequence": True, "parallel.context": 2, "data.seq_length": 8}, 8),
        ({"parallel.tensor": 4, "model.num_query_groups": 2}, 4),  # two ranks share a query group
        ({"parallel.tensor": 12, "model.num_query_groups": 1, "model.ffn_hidden_size": 240}, 12),
        ({"parallel.tensor": 2}, None),  # the world size is not known yet
        ({"model.hidden_size": 100, "model.kv_channels": 8}, None),  # heads need not fill the hidden size
        ({"parallel.tensor": 4, "model.hidden_size": 100, "model.kv_channels": 8, "model.vocab_size": 257}, 4),
        (LEARNED, None),
        (LEARNED | {"model.kv_channels": 7}, None),  # odd head sizes are fine without rope
        (WSD | {"optim.wsd.decay_style": "minus_sqrt", "optim.decay_steps": 80, "optim.warmup_steps": 60}, None),
        ({"optim.schedule": "constant", "optim.warmup_steps": 100}, None),
        ({"optim.schedule": "inverse-square-root", "optim.min_lr": 1e-5, "optim.warmup_steps": 10}, None),
        ({"optim.weight_decay_ramp.schedule": "linear", "optim.weight_decay_ramp.end": 0.0}, None),
        ({"train.compile": True, "experimental": ["compile"]}, None),
        ({"train.evaluation.every": 5, "train.evaluation.samples": 7, "data.valid": "held_out"}, None),
        ({"precision.dtype": "float16", "precision.loss_scale.hysteresis": 1}, None),
        (SGD | {"optim.sgd.momentum": 0.9, "optim.sgd.nesterov": True}, None),
        ({"optim.wsd": {}, "train.evaluation": {"every": None}}, None),  # a group of nulls is not set
        ({"optim.overrides": [{"match": "*.bias", "wd_mult": 0}]}, None),
        ({"model.rope.base": None, "parallel.sequence": None, "precision": None}, None),  # null: not set
    ],
)
def test_unusual_settings_that_are_sound_pass(changes, world_size):
    assert violations(applied(VALID, changes), world_size) == []
