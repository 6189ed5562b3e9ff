"""Suggestions are applied: each fixes its violation and causes none, and one after another they fix all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.config import load_run, run_config, suggestions, transformer_config, violations
from megalith.config.settings_tree import FIELDS, applied, plain_tree
from megalith.config.suggestions import _examine, advise
from megalith.config.yaml_text import read_override
from tests.config.mistakes import MISTAKES, VALID


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_every_suggestion_is_valid(mistake):
    tree = plain_tree(applied(VALID, mistake.changes))
    before = advise(tree, mistake.world_size)
    for advice in before:
        assert advice.fix is not None, advice
        after = advise(applied(tree, advice.fix), mistake.world_size)
        assert len(after) < len(before)
        assert advice.message not in [other.message for other in after]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_suggestion_can_be_typed_as_it_stands(mistake):
    tree = plain_tree(applied(VALID, mistake.changes))
    for advice in advise(tree, mistake.world_size):
        words = str(advice).removeprefix(advice.message)
        for name, value in (advice.fix or {}).items():
            if name not in FIELDS:
                assert f"remove {name}" in words
                continue
            start = words.index(f"{name}=")
            ends = [
                i for i in range(start, len(words) + 1) if words[i : i + 2] == ", " or words[i : i + 5] in (" and ", "")
            ]
            assert (name, value) in [read_override(words[start:end]) for end in ends if _readable(words[start:end])]


def test_names_that_are_not_text_can_be_removed_too():
    tree = VALID | {5: 3, "train": VALID["train"] | {None: 2}}
    assert [line.partition("; ")[0] for line in violations(tree)] == [
        "there is no setting train.None",
        "there is no setting 5",
    ]
    assert [advice.fix for advice in advise(tree)] == [{"train.None": None}, {"5": None}]


SMALL = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 30, 32, 48, 63, 64, 96, 100])
DIFFERENT = {
    "model.hidden_size": SMALL,
    "model.num_attention_heads": SMALL,
    "model.num_query_groups": SMALL,
    "model.kv_channels": SMALL,
    "model.ffn_hidden_size": SMALL,
    "model.position_embedding_type": st.sampled_from(["rope", "learned_absolute", "alibi"]),
    "model.max_position_embeddings": SMALL,
    "model.preset": st.sampled_from(["llama-4m", "gpt2-124m", "gpt-2"]),
    "data.seq_length": SMALL,
    "train.steps": st.sampled_from([0, 1, 2, 10, 1000, "10"]),
    "train.global_batch_size": SMALL,
    "train.micro_batch_size": SMALL,
    "train.batch_size_schedule": st.sampled_from(["0:8 1K:16", "0:7 1K:9", "1:8", "16", "0:8 10:16 20:32"]),
    "train.batch_size_schedule_unit": st.sampled_from(["samples", "tokens"]),
    "train.evaluation.every": SMALL,
    "train.compile": st.booleans(),
    "optim.lr": st.sampled_from([1e-3, "3e-4", 0, None]),
    "optim.min_lr": st.sampled_from([0, 1e-4, 1.0]),
    "optim.schedule": st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD", "wsd"]),
    "optim.warmup_steps": st.sampled_from([0, 1, 10, 99, 100, 5000]),
    "optim.decay_steps": SMALL,
    "optim.wsd.decay_steps": SMALL,
    "optim.weight_decay_ramp.schedule": st.sampled_from(["constant", "cosine"]),
    "parallel.tensor": SMALL,
    "parallel.sequence": st.booleans(),
    "parallel.context": st.sampled_from([1, 2, 3, 4, 8]),
    "parallel.context_method": st.sampled_from(["ring", "all_gather", "all_to_all", "two_level"]),
    "parallel.context_inner": st.sampled_from([1, 2, 4]),
    "parallel.pipeline": st.sampled_from([1, 2, 3, 4]),
    "parallel.virtual": st.sampled_from([1, 2, 3]),
    "parallel.schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v", "zb_h1"]),
    "parallel.stage_layers": st.sampled_from([[2, 2], [1, 2, 1], [1, 1, 1, 1]]),
    "parallel.replicate": st.sampled_from([-1, 1, 2, 3]),
    "parallel.shard": st.sampled_from([-1, 0, 1, 2, 4, 7]),
    "precision.dtype": st.sampled_from(["float32", "float16", "fp16"]),
    "optim.name": st.sampled_from(["adamw", "sgd", "adam"]),
    "optim.adamw.eps": st.sampled_from([1e-6, 0]),
    "optim.sgd.momentum": st.sampled_from([0.0, 0.9, 1.0]),
    "optim.sgd.nesterov": st.booleans(),
    "optim.wsd.decay_style": st.sampled_from(["linear", "linea"]),
    "model.rope": st.sampled_from([{"base": 5e5}, {"bas": 5e5}, 5e5]),
    "precision.loss_scale.hysteresis": st.sampled_from([0, 2]),
    "train.lr": st.just(0.1),
    "experimental": st.sampled_from([["compile"], ["compil"], "compile"]),
}
OF_EXPERTS = {
    "model.moe.num_experts": SMALL,
    "model.moe.top_k": st.sampled_from([0, 1, 2, 3, 8]),
    "model.moe.ffn_hidden_size": SMALL,
    "model.moe.layers": st.sampled_from([[False, True], [False]]),
    "model.moe.shared_ffn_hidden_size": SMALL,
    "model.moe.latent_size": SMALL,
    "model.moe.router.score_function": st.sampled_from(["sigmoid", "sigmod", "softmax"]),
    "model.moe.router.pre_softmax": st.booleans(),
    "model.moe.router.num_groups": st.sampled_from([2, 3, 4]),
    "model.moe.router.group_topk": st.sampled_from([1, 2, 5]),
    "model.moe.router.selection": st.sampled_from(["top_k", "sinkhorn", "quantile", "round_robin"]),
    "model.moe.router.expert_bias_update_rate": st.sampled_from([0.01, -1]),
    "model.moe.router.sequence_balance": st.sampled_from([0.1, -1]),
    "model.moe.router.global_balance": st.just(0.1),
    "model.moe.capacity.factor": st.sampled_from([1.0, 0]),
    "model.moe.capacity.pad": st.booleans(),
    "parallel.expert": st.sampled_from([1, 2, 3, 4, 5, 8]),
    "parallel.expert_tensor": st.sampled_from([1, 2, 3, 4]),
    "parallel.dispatch.method": st.sampled_from(["all_gather", "flex", "symmetric", "all_to_al"]),
    "parallel.dispatch.max_rows": st.sampled_from([0, 1.5]),
    "parallel.ep": st.just(2),
    **{
        name: DIFFERENT[name]
        for name in ("parallel.tensor", "parallel.sequence", "parallel.context", "parallel.pipeline", "parallel.shard")
    },
}
WORLDS = st.sampled_from([None, 1, 2, 4, 6, 8, 30])


def some_of(different: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    return st.lists(st.sampled_from(sorted(different)), max_size=8, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: different[name] for name in names})
    )


@pytest.mark.parametrize("num_examples", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_following_suggestions_one_after_the_other_mends_any_run(num_examples):
    @settings(max_examples=num_examples, derandomize=True)
    @given(some_of(DIFFERENT), WORLDS)
    def mended(changes, world_size):
        mend(changes, world_size)

    mended()


@pytest.mark.parametrize("num_examples", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_following_suggestions_one_after_the_other_mends_any_run_with_experts(num_examples):
    @settings(max_examples=num_examples, derandomize=True)
    @given(some_of(OF_EXPERTS), WORLDS)
    def mended(changes, world_size):
        mend({"model.moe.num_experts": 8, **changes}, world_size)

    mended()


def mend(changes, world_size):
    tree = plain_tree(applied(VALID, changes))
    found = advise(tree, world_size)
    while found:
        fixes = [advice.fix for advice in found]
        assert None not in fixes, found
        tree = applied(tree, fixes[0])
        remaining = advise(tree, world_size)
        assert len(remaining) < len(found), (fixes[0], found, remaining)
        found = remaining
    load_run(tree, world_size=world_size)


@pytest.mark.parametrize(("name", "meant"), [("ep", "expert"), ("etp", "expert_tensor"), ("pp", "pipeline")])
def test_an_axis_by_its_letters_is_the_axis(name, meant):
    tree = plain_tree(applied(VALID, {"model.moe.num_experts": 8, f"parallel.{name}": 2}))
    assert f"did you mean parallel.{meant}? " in violations(tree, world_size=4)[0]


def test_the_rules_are_held_once_for_each_settings_that_are_tried(monkeypatch):
    held = []
    monkeypatch.setattr(transformer_config, "broken", lambda *_: held.append("model") or [])
    monkeypatch.setattr(run_config, "broken", lambda *_: held.append("run") or [])
    assert violations(plain_tree(VALID), world_size=1) == []
    assert held == []
    load_run(VALID, world_size=1)
    assert sorted(set(held)) == ["model", "run"]


def test_a_run_of_many_ranks_is_mended_by_a_few_hundred_tries(monkeypatch):
    examined = []

    def examine(tree, world_size):
        examined.append(tree)
        return _examine(tree, world_size)

    monkeypatch.setattr(suggestions, "_examine", examine)
    tree = plain_tree(applied(VALID, {"parallel.tensor": 48, "train.global_batch_size": 7, "optim.warmup_steps": 500}))
    assert len(violations(tree, world_size=131_072)) >= 3
    assert len(examined) < 500  # found with 276; this world size has thousands of layouts


def _readable(text: str) -> bool:
    try:
        read_override(text)
    except ValueError:
        return False
    return True
