"""A small recipe is valid in each of its layouts, and has the features of the large one."""

import random
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any

import pytest

from megalith.config import (
    MoEConfig,
    RunConfig,
    TransformerConfig,
    batch_size_stages,
    load_run,
    preset_names,
    recipe_names,
)
from megalith.config.layout import Layout
from megalith.config.settings_tree import applied
from megalith.errors import ConfigError
from megalith.insight.verify.cover import AXES, cover, degrees_to_show, num_ranks
from megalith.insight.verify.experts import comparable_at
from megalith.insight.verify.shrink import SEQ_LENGTH, on_layout, on_one_process, small_recipe
from tests.insight.verify.proofs import GPT2_RECIPE
from tests.sampling import sampled

CHOICES: dict[str, list[Any]] = {
    "parallel.tensor": [1, 2, 3, 8],
    "parallel.context": [1, 2, 4],
    "parallel.context_method": [None, "ring", "all_gather", "all_to_all", "two_level"],
    "parallel.context_inner": [None, 2],
    "parallel.pipeline": [1, 2, 3, 4],
    "parallel.virtual": [None, 1, 2, 3],
    "parallel.schedule": [None, "gpipe"],
    "parallel.replicate": [1, 2, 3],
    "parallel.shard": [1, 2, 4],
    "parallel.sequence": [False, True],
    "model.num_layers": [1, 12, 13],
    "model.num_attention_heads": [8, 24, 48],
    "model.num_query_groups": [None, 1, 2, 8, 24],
    "model.hidden_size": [384, 768],
    "model.kv_channels": [None, 16, 64],
    "model.activation": ["swiglu", "gelu"],
    "model.normalization": ["RMSNorm", "LayerNorm"],
    "model.position_embedding_type": ["rope", "learned_absolute"],
    "model.rope.percent": [None, 0.25, 0.6],
    "model.rope.layers": [None, [True, True, False]],
    "model.mla.kv_lora_rank": [None, None, 512],
    "model.mla.q_lora_rank": [None, 1536],
    "model.mla.v_head_dim": [128, 192],
    "model.attention.window": [None, 100, 5000],
    "model.attention.window_layers": [None, [True, False]],
    "model.moe.num_experts": [None, 8, 24, 64],
    "model.moe.top_k": [1, 2, 6, 8],
    "model.moe.layers": [None, [False, True], [False, True, True]],
    "model.moe.ffn_hidden_size": [None, 192],
    "model.moe.shared_ffn_hidden_size": [None, 384],
    "model.moe.latent_size": [None, 64],
    "model.moe.router.num_groups": [None, 8],
    "model.moe.router.group_topk": [1, 2, 4, 8],
    "model.moe.router.group_score_topk": [None, None, 1, 2],
    "model.moe.router.score_function": ["softmax", "sigmoid"],
    "model.moe.router.selection": ["top_k", "top_k", "sinkhorn", "round_robin"],
    "model.moe.router.micro_batch_balance": [0.0, 0.0, 0.1],
    "model.moe.router.global_balance": [0.0, 0.1],
    "model.moe.capacity.factor": [None, None, 1.25],
    "model.moe.capacity.drop": [None, "position"],
    "model.moe.capacity.pad": [None, True],
    "parallel.expert": [1, 2, 4],
    "parallel.expert_tensor": [None, 1, 2],
    "parallel.dispatch.max_rows": [None, 2.0],
    "model.vocab_size": [50257, 50304],
    "model.tie_word_embeddings": [False, True],
    "model.hidden_dropout": [0.0, 0.1],
    "model.attention.softmax": ["vanilla", "learnable"],
    "model.attention.qk_norm": [None, "L2"],
    "model.attention.logit_softcap": [None, 50.0],
    "model.residual.norm_placement": ["pre", "post", "sandwich"],
    "model.residual.zero_centered_norm": [False, True],
    "model.mlp_bias": [None, True],
    "model.multipliers.embedding": [1.0, 30.0],
    "model.multipliers.logit_softcap": [None, 30.0],
    "model.mup.base_hidden_size": [None, 96],
    "model.mtp.num_modules": [None, 1, 3],
    "data.reset_attention_mask": [False, True],
    "train.micro_batch_size": [1, 2, 8],
    "train.recompute": ["none", "full", "selective"],
    "train.batch_size_schedule": [None, "0:1152 10K:2304"],
    "train.evaluation.every": [None, 10],
    "optim.schedule": ["constant", "linear", "cosine", "WSD"],
    "optim.name": ["adamw", "sgd"],
    "precision.dtype": ["float32", "bfloat16", "float16"],
}
KEPT = [
    "model.activation",
    "model.normalization",
    "model.position_embedding_type",
    "model.tie_word_embeddings",
    "model.hidden_dropout",
    "model.attention.softmax",
    "model.attention.qk_norm",
    "model.attention.logit_softcap",
    "model.residual.norm_placement",
    "model.residual.zero_centered_norm",
    "model.mlp_bias",
    "model.multipliers.embedding",
    "model.multipliers.logit_softcap",
    "data.reset_attention_mask",
    "optim.schedule",
    "optim.name",
]


OF_RANKS = AXES[:5]


def drawn(source: random.Random) -> tuple[RunConfig, int] | None:
    """A recipe with random settings, and its number of ranks; None if the settings contradict each other."""
    values = {name: source.choice(choices) for name, choices in CHOICES.items()}
    values |= {"train.global_batch_size": None if values["train.batch_size_schedule"] else 1152, "data.seq_length": 768}
    values |= {"optim.warmup_steps": 20, "optim.wsd.decay_steps": 10 if values["optim.schedule"] == "WSD" else None}
    values |= {"data.valid": "elsewhere", "optim.clip_norm": None}
    world_size = prod(values[f"parallel.{axis}"] for axis in OF_RANKS)
    if values["parallel.context"] == 1:
        values |= {"parallel.context_method": None, "parallel.context_inner": None}
    if values["model.mla.kv_lora_rank"] is None:
        values |= {"model.mla.q_lora_rank": None, "model.mla.v_head_dim": None}
    else:
        heads = ("num_query_groups", "kv_channels", "position_embedding_type", "attention.softmax", "attention.qk_norm")
        values |= dict.fromkeys(f"model.{name}" for name in (*heads, "rope.percent"))
    if values["model.moe.num_experts"] is None:
        of_experts = ("model.moe.", "parallel.expert", "parallel.dispatch.")
        values |= {name: None for name in values if name.startswith(of_experts)}
    elif values["model.moe.router.num_groups"] is None:
        values["model.moe.router.group_topk"] = None
    if values["model.position_embedding_type"] == "learned_absolute":
        values |= {"model.rope.percent": None, "model.rope.layers": None}
    if values["model.attention.window"] is None:
        values["model.attention.window_layers"] = None
    if values["parallel.context_method"] != "two_level":
        values["parallel.context_inner"] = None
    if values["parallel.pipeline"] == 1:
        values |= {"parallel.virtual": None, "parallel.schedule": None}
    tree = applied({name: group for name, group in GPT2_RECIPE.items() if name != "model"}, values)
    try:
        config = RunConfig.model_validate(tree)
        return config, Layout.resolve(world_size, **{a: values[f"parallel.{a}"] for a in AXES}).world_size
    except (ValueError, ConfigError):
        return None


def small_runs(config: RunConfig, world_size: int) -> tuple[RunConfig, list[tuple[RunConfig, dict[str, int]]]]:
    """The small run of one process, and those of every layout; raises unless each is valid."""
    layout = config.parallel.layout(world_size)
    shown = degrees_to_show(config, layout)
    rows = cover(shown)
    small = small_recipe(config, layout, shown, rows)
    alone = load_run(on_one_process(small), world_size=1)
    return alone, [(load_run(on_layout(small, config, row, "float64"), world_size=num_ranks(row)), row) for row in rows]


def value(config: RunConfig, name: str) -> Any:
    return attrgetter(name)(config)


def kinds_of_layers(model: TransformerConfig) -> set[tuple[bool, bool, bool]]:
    """The kinds of layers: with or without a window, rotary positions, experts."""
    layers = range(model.num_layers)
    rotates = [model.rope is not None and model.rope.rotates(layer) for layer in layers]
    experts = [model.moe is not None and model.moe.has_experts(layer) for layer in layers]
    return {(model.attention.window_of(layer) is not None, rotates[layer], experts[layer]) for layer in layers}


def holds(config: RunConfig, world_size: int) -> None:
    """What must hold for the small runs of any recipe."""
    large, large_layout = config.model, config.parallel.layout(world_size)
    alone, runs = small_runs(config, world_size)
    assert [value(alone, name) for name in KEPT] == [value(config, name) for name in KEPT]
    small, tensor = alone.model, large_layout.tensor
    assert small.hidden_size <= 192
    assert small.num_layers <= 9
    assert (small.num_query_groups == small.num_attention_heads) == (
        large.num_query_groups == large.num_attention_heads
    )
    holds_of_heads(config, large_layout, small, max(row.get("tensor", 1) for _, row in runs) if runs else 1)
    assert (small.mtp and small.mtp.loss_weight) == (large.mtp and large.mtp.loss_weight)
    assert (large.vocab_size is None or large.vocab_size % tensor > 0) == (small.vocab_size == 61)
    assert kinds_of_layers(small) == kinds_of_layers(large)
    if large.attention.window is not None:
        assert (small.attention.window < SEQ_LENGTH) == (large.attention.window < config.data.seq_length)
    assert (small.mla is None) == (large.mla is None)
    if large.mla is not None:
        assert (small.mla.q_lora_rank is None) == (large.mla.q_lora_rank is None)
        assert (small.mla.v_head_dim == small.kv_channels) == (large.mla.v_head_dim == large.kv_channels)
    if large.rope is not None:
        assert (small.rope.percent < 1) == (large.rope.percent < 1)
    assert (small.moe is None) == (large.moe is None)
    if large.moe is not None:
        holds_of_experts(large.moe, small.moe)
    assert alone.train.recompute == "none"
    for run, row in runs:
        assert run.model == small
        assert run.train.recompute == config.train.recompute
        assert run.train.batch_size_schedule == alone.train.batch_size_schedule
        parallel = run.parallel
        num_micro_batches = run.train.global_batch_size // run.train.micro_batch_size
        assert num_micro_batches > row.get("replicate", 1) * row.get("shard", 1)
        of_one, together = alone.train.micro_batch_size, run.train.micro_batch_size
        if comparable_at(large.moe) == "equal micro-batches":
            assert of_one == together > 1
        elif comparable_at(large.moe) == "equal numbers of them":
            assert of_one == together * row.get("replicate", 1) * row.get("shard", 1)
        else:
            assert of_one == batch_size_stages(alone.train, SEQ_LENGTH)[0].global_batch_size
        if "tensor" in row:
            assert parallel.sequence == config.parallel.sequence
            shares = large.num_query_groups < tensor
            assert (small.num_query_groups < parallel.tensor) == shares
        if "context" in row:
            assert parallel.context_method == config.parallel.context_method
        if "pipeline" in row:
            assert (parallel.virtual > 1) == (config.parallel.virtual > 1)
            assert parallel.schedule == config.parallel.schedule
            stages, small_stages = (p.pipeline * p.virtual for p in (config.parallel, parallel))
            if large.num_layers % stages:
                assert small.num_layers % small_stages


def holds_of_experts(large: MoEConfig, small: MoEConfig) -> None:
    """As in the large model: one expert per token or several, all or some; one group or several; the same parts."""
    assert (small.top_k > 1, small.top_k < small.num_experts) == (large.top_k > 1, large.top_k < large.num_experts)
    for name in ("ffn_hidden_size", "shared_ffn_hidden_size", "latent_size", "capacity"):
        assert (getattr(small, name) is None) == (getattr(large, name) is None)
    assert (small.router.score_function, small.router.selection) == (
        large.router.score_function,
        large.router.selection,
    )
    if large.router.num_groups is None:
        assert small.router.num_groups is None
        return
    kept, small_kept = large.router.group_topk, small.router.group_topk
    assert (small_kept > 1, small_kept < small.router.num_groups) == (kept > 1, kept < large.router.num_groups)
    assert (small.top_k > small_kept) == (large.top_k > kept)


def holds_of_heads(config: RunConfig, layout: Layout, small: TransformerConfig, tensor: int) -> None:
    """As in the large model: a rank of ``tensor`` has one head or group or several, an odd or even number."""
    large, method = config.model, config.parallel.context_method
    assert (small.num_attention_heads > tensor) == (large.num_attention_heads > layout.tensor)
    if large.num_query_groups < layout.tensor:
        assert (small.num_query_groups > 1) == (large.num_query_groups > 1)
        return
    groups_here, large_groups_here = small.num_query_groups // tensor, large.num_query_groups // layout.tensor
    trading = {"all_to_all": layout.context, "two_level": config.parallel.context_inner}.get(method, 1)
    if trading > 1 and large.num_query_groups < large.num_attention_heads:  # by two ranks in each small layout
        assert (groups_here % 2 == 0) == (large_groups_here % trading == 0)
        return
    assert (groups_here > 1) == (large_groups_here > 1)
    in_group, large_in_group = (m.num_attention_heads // m.num_query_groups for m in (small, large))
    assert in_group % 2 == large_in_group % 2


@pytest.mark.parametrize("number", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_random_recipes_are_valid_when_they_are_small(number):
    source, num_found, seen = random.Random(0), 0, set()
    while num_found < number:
        found = drawn(source)
        if found is not None:
            holds(*found)
            num_found += 1
            names = [name for name in CHOICES if name in KEPT or name.count(".") == 1]
            seen |= {(name, str(value(found[0], name))) for name in [*names, "model.mla", "model.moe"]}
    assert {name for name, _ in seen} >= set(KEPT)
    assert len({kind for name, kind in seen if name == "model.mla"}) > 1
    assert len({kind for name, kind in seen if name == "model.moe"}) > number // 15
    assert len({method for name, method in seen if name == "parallel.context_method"}) == 4


LAYOUTS: list[dict[str, Any]] = [{}, {"tensor": 4, "sequence": True, "context": 2, "pipeline": 2}, {"shard": 8}]


@pytest.mark.parametrize(
    ("recipe", "parallel"),
    sampled([*product(recipe_names(), LAYOUTS)], lambda case: {case[0], str(case[1])}),
)
def test_every_recipe_of_the_package_can_be_made_small(recipe, parallel):
    overrides = [f"parallel.{name}={str(value).lower()}" for name, value in parallel.items()]
    config = load_run(recipe, overrides)
    degrees = {"shard": 2, **{axis: size for axis, size in parallel.items() if axis in AXES}}
    holds(config, prod(degrees.values()))


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_made_small(preset):
    holds(load_run("llama-28m", [f"model.preset={preset}", "train.micro_batch_size=1"]), 2)


@pytest.mark.parametrize(
    ("listed", "want"), [([9, 8, 8, 7], [2, 1, 1, 1]), ([7, 8, 8, 9], [1, 1, 1, 2]), ([8] * 4, [1] * 4)]
)
def test_the_longest_stage_stays_the_longest(listed, want):
    parallel = {"pipeline": 4, "stage_layers": listed}
    tree = {**GPT2_RECIPE, "model": {**GPT2_RECIPE["model"], "num_layers": 32}, "parallel": parallel}
    _, runs = small_runs(load_run(tree, world_size=4), 4)
    assert [run.parallel.stage_layers for run, row in runs if row["pipeline"] == 4] == [tuple(want)]


def test_scores_keep_their_size_under_a_scale_that_is_given():
    model = {**GPT2_RECIPE["model"], "attention": {"scale": 0.125}}
    large = load_run({**GPT2_RECIPE, "model": model}, world_size=1).model
    small = small_runs(load_run({**GPT2_RECIPE, "model": model}, world_size=1), 1)[0].model
    sizes = [shape.attention.scale * shape.kv_channels**0.5 for shape in (large, small)]
    assert sizes[0] == pytest.approx(sizes[1])


def test_what_is_the_users_is_left_alone():
    more = {"load": "somewhere", "tracking": ["wandb"], "checkpoint": {"every": 5}}
    alone, _ = small_runs(load_run({**GPT2_RECIPE, **more}, world_size=1), 1)
    assert (alone.load, alone.tracking, alone.checkpoint.every, alone.data.valid) == (None, None, None, None)


def test_the_small_runs_of_a_blend_have_one_dataset_of_their_own():
    overrides = ["data.train={a: x, b: y}", "data.weights={a: 1, b: 2}"]
    overrides.append("data.phases=[{first_sample: 9, weights: {a: 1, b: 0}}]")
    alone, runs = small_runs(load_run("llama-4m", [*overrides, "parallel.tensor=2"], world_size=2), 2)
    for config in (alone, *(config for config, _ in runs)):
        assert (config.data.weights, config.data.phases) == (None, ())
