"""Every layout computes what one process does: float64, gloo ranks, against plain torch.

These layouts are chosen by hand. `make test` runs generated ones of test_layout_cover.py, with every value of these
settings, and of these only what those lack.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import pytest

from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training.model_options_mla import latent
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences, reference

Layout = tuple[int, dict[str, Any]]


def layout(world_size: int, tensor: int = 1, replicate: int = 1, shard: int = -1, **groups: Any) -> Layout:
    of_parallel = (
        "sequence",
        "context",
        "context_method",
        "context_inner",
        "pipeline",
        "virtual",
        "schedule",
        "stage_layers",
    )
    more = {name: groups.pop(name) for name in of_parallel if name in groups}
    return world_size, {"parallel": {"tensor": tensor, "replicate": replicate, "shard": shard, **more}, **groups}


FIVE_LAYERS = {"num_layers": 5}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
LAYOUTS: dict[str, Layout] = {
    "one rank": layout(1),
    "one rank, one row at a time": layout(1, train={"micro_batch_size": 1}),
    "shard 2": layout(2, shard=2),
    "replicate 2": layout(2, replicate=2, shard=1),
    "tensor 2": layout(2, tensor=2),
    "tensor 2, sequence": layout(2, tensor=2, sequence=True),
    "tensor 2, sequence, packed, recompute": layout(
        2, tensor=2, sequence=True, data=PACKED, train={"recompute": "full", "micro_batch_size": 1}
    ),
    "shard 4, accumulation": layout(4, shard=4, train={"micro_batch_size": 1}),
    "hybrid 2 x 2": layout(4, replicate=2, shard=2),
    "tensor 4": layout(4, tensor=4),
    "tensor 4, sequence, one micro-batch": layout(4, tensor=4, sequence=True, train={"micro_batch_size": 8}),
    "tensor 2 x shard 2, selective": layout(4, tensor=2, shard=2, train={"recompute": "selective"}),
    "tensor 2 x shard 2, sequence, packed": layout(4, tensor=2, shard=2, sequence=True, data=PACKED),
    "tensor 2 x replicate 2, sequence, accumulation": layout(
        4, tensor=2, replicate=2, shard=1, sequence=True, train={"micro_batch_size": 1}
    ),
    "pipeline 2": layout(2, pipeline=2),
    "pipeline 2, gpipe, packed, recompute": layout(
        2, pipeline=2, schedule="gpipe", data=PACKED, train={"recompute": "full"}
    ),
    "pipeline 2, interleaved, five layers": layout(2, pipeline=2, virtual=2, model=FIVE_LAYERS),
    "pipeline 4, listed layers": layout(
        4, pipeline=4, stage_layers=[1, 2, 1, 1], model=FIVE_LAYERS, train={"micro_batch_size": 1}
    ),
    "pipeline 2, zero bubble, five layers, recompute": layout(
        2,
        pipeline=2,
        schedule="zero_bubble",
        model=FIVE_LAYERS,
        train={"recompute": "full", "micro_batch_size": 1},
    ),
    "pipeline 4, zero bubble, listed layers": layout(
        4,
        pipeline=4,
        schedule="zero_bubble",
        stage_layers=[1, 2, 1, 1],
        model=FIVE_LAYERS,
        train={"micro_batch_size": 1},
    ),
    "pipeline 2 x tensor 2 x shard 2, zero bubble, sequence, packed": layout(
        8,
        tensor=2,
        shard=2,
        sequence=True,
        pipeline=2,
        schedule="zero_bubble",
        data=PACKED,
        train={"micro_batch_size": 1},
    ),
    "pipeline 2, zb_v, five layers": layout(
        2, pipeline=2, virtual=2, schedule="zb_v", model=FIVE_LAYERS, train={"micro_batch_size": 1}
    ),
    "pipeline 2 x shard 2, zb_v, selective": layout(
        4,
        shard=2,
        pipeline=2,
        virtual=2,
        schedule="zb_v",
        model=FIVE_LAYERS,
        train={"recompute": "selective", "micro_batch_size": 1},
    ),
    "pipeline 2 x replicate 2 x shard 2, zb_v": layout(
        8,
        replicate=2,
        shard=2,
        pipeline=2,
        virtual=2,
        schedule="zb_v",
        model=FIVE_LAYERS,
        train={"micro_batch_size": 1},
    ),
    "pipeline 2 x tensor 2 x context 2, zb_v, sequence, packed": layout(
        8, tensor=2, context=2, sequence=True, pipeline=2, virtual=2, schedule="zb_v", model=FIVE_LAYERS, data=PACKED
    ),
    "pipeline 4, zb_v, eight layers": layout(
        4, pipeline=4, virtual=2, schedule="zb_v", model={"num_layers": 8}, train={"micro_batch_size": 1}
    ),
    "pipeline 2 x tensor 2, sequence": layout(4, tensor=2, sequence=True, pipeline=2),
    "pipeline 2 x shard 2, interleaved": layout(
        4, shard=2, pipeline=2, virtual=2, model=FIVE_LAYERS, train={"micro_batch_size": 1}
    ),
    "pipeline 2 x tensor 2 x shard 2, sequence, packed": layout(
        8, tensor=2, shard=2, sequence=True, pipeline=2, data=PACKED, train={"micro_batch_size": 1}
    ),
    "pipeline 2 x replicate 2, selective": layout(
        4, replicate=2, shard=1, pipeline=2, train={"recompute": "selective"}
    ),
    "context 2": layout(2, context=2),
    "context 2, gathered, packed": layout(2, context=2, context_method="all_gather", data=PACKED),
    "context 2, heads traded, packed, recompute": layout(
        2, context=2, context_method="all_to_all", data=PACKED, train={"recompute": "full"}
    ),
    "context 4, packed, selective": layout(4, context=4, data=PACKED, train={"recompute": "selective"}),
    "context 4, two levels": layout(4, context=4, context_method="two_level", context_inner=2),
    "tensor 2 x context 2, sequence, packed": layout(4, tensor=2, context=2, sequence=True, data=PACKED),
    "tensor 2 x context 2, heads traded": layout(4, tensor=2, context=2, context_method="all_to_all"),
    "context 2 x shard 2, accumulation": layout(4, context=2, shard=2, train={"micro_batch_size": 1}),
    "context 2 x pipeline 2": layout(4, context=2, pipeline=2),
    "tensor 2 x context 2 x pipeline 2, sequence, packed": layout(
        8, tensor=2, context=2, sequence=True, pipeline=2, data=PACKED
    ),
    "context 2 x replicate 2, gathered": layout(4, context=2, replicate=2, shard=1, context_method="all_gather"),
}
# a sample for the other shape, whose dropout, biases, tied weights and learned positions the first lacks
FOR_GPT2 = [
    "one rank, one row at a time",
    "shard 2",
    "tensor 2",
    "tensor 2, sequence, packed, recompute",
    "hybrid 2 x 2",
    "tensor 4, sequence, one micro-batch",
    "tensor 2 x shard 2, selective",
    "tensor 2 x shard 2, sequence, packed",
    "tensor 2 x replicate 2, sequence, accumulation",
    "pipeline 2",
    "pipeline 2, interleaved, five layers",
    "pipeline 2 x tensor 2, sequence",
    "pipeline 2 x shard 2, interleaved",
    "pipeline 2, zero bubble, five layers, recompute",
    "pipeline 2, zb_v, five layers",
    "pipeline 2 x shard 2, zb_v, selective",
    "pipeline 4, zb_v, eight layers",
    "context 2",
    "context 2, gathered, packed",
    "context 4, two levels",
    "tensor 2 x context 2, sequence, packed",
    "tensor 2 x context 2, heads traded",
    "context 2 x shard 2, accumulation",
    "context 2 x pipeline 2",
]
# layouts with fewer query groups than ranks of tp, with the number of groups
SHARED_GROUPS = [
    ("tensor 2, sequence, packed, recompute", 1),
    ("tensor 4", 1),
    ("tensor 4", 2),
    ("tensor 4, sequence, one micro-batch", 1),
    ("tensor 4, sequence, one micro-batch", 2),
    ("tensor 2 x shard 2, selective", 1),
    ("tensor 2 x shard 2, sequence, packed", 1),
    ("tensor 2 x replicate 2, sequence, accumulation", 1),
    ("tensor 2 x context 2, sequence, packed", 1),
    ("tensor 2 x context 2, heads traded", 1),
]
# for multi-latent attention: context by every method, latent weights in every kind of stage
FOR_LATENTS = [
    "one rank, one row at a time",
    "hybrid 2 x 2",
    "tensor 4",
    "tensor 2, sequence, packed, recompute",
    "tensor 2 x replicate 2, sequence, accumulation",
    "pipeline 2, zero bubble, five layers, recompute",
    "pipeline 2 x tensor 2 x shard 2, zero bubble, sequence, packed",
    "pipeline 2 x tensor 2 x context 2, zb_v, sequence, packed",
    "context 2, gathered, packed",
    "context 2, heads traded, packed, recompute",
    "context 4, two levels",
    "tensor 2 x context 2, heads traded",
    "context 2 x shard 2, accumulation",
]
LATENTS_IN_MAKE_TEST = ["context 2, gathered, packed", "context 2, heads traded, packed, recompute"]
# what no generated layout of `make test` has: one rank, stages with listed layers, eight stages, a step of one
# micro-batch, dropout with 1F1B
LLAMA_IN_MAKE_TEST = ["one rank", "pipeline 4, zero bubble, listed layers", "pipeline 4, zb_v, eight layers"]
GPT2_IN_MAKE_TEST = ["tensor 4, sequence, one micro-batch", "pipeline 2"]
# tests/training/reference.py does not depend on these
NOT_IN_REFERENCE = ("parallel",)


def check(name: str, model: dict[str, Any], tmp_path: Any, references: dict[Hashable, Trajectory]) -> None:
    world_size, groups = LAYOUTS[name]
    model = {**model, **groups.get("model", {})}
    tree = settings(tmp_path, **{**groups, "model": model})
    # what a reference depends on
    same = "data" in groups, tree["model"]["num_query_groups"], tree["model"]["num_layers"]
    if same not in references:
        references[same] = reference({key: group for key, group in tree.items() if key not in NOT_IN_REFERENCE})
    for rank, found in enumerate(ranks(world_size, first_steps, tree, world_size)):
        assert differences(found, references[same]) == [], f"on rank {rank}"


@pytest.fixture(scope="module")
def llama_references() -> dict[Hashable, Trajectory]:
    return {}


@pytest.fixture(scope="module")
def latent_references() -> dict[Hashable, Trajectory]:
    return {}


@pytest.fixture(scope="module")
def gpt2_references() -> dict[Hashable, Trajectory]:
    return {}


def slow_but(kept: Iterable[str], names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(LLAMA_IN_MAKE_TEST, LAYOUTS))
def test_a_llama_learns_the_same_in_every_layout(name, tmp_path, llama_references):
    check(name, {}, tmp_path, llama_references)


@pytest.mark.parametrize("name", slow_but(GPT2_IN_MAKE_TEST, FOR_GPT2))
def test_a_gpt2_with_dropout_learns_the_same_in_every_layout(name, tmp_path, gpt2_references):
    check(name, {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}, tmp_path, gpt2_references)


@pytest.mark.parametrize("name", slow_but(LATENTS_IN_MAKE_TEST, FOR_LATENTS))
def test_latent_attention_learns_the_same_in_every_layout(name, tmp_path, latent_references):
    check(name, latent(8, attention_dropout=0.1)["model"], tmp_path, latent_references)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "groups"), SHARED_GROUPS)
def test_ranks_that_share_a_group_of_heads_learn_the_same(name, groups, tmp_path, gpt2_references):
    check(name, {**GPT2, "ffn_hidden_size": None, "num_query_groups": groups}, tmp_path, gpt2_references)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["tensor 4", "tensor 4, sequence, one micro-batch"])
def test_a_llama_whose_ranks_share_a_group_of_heads_learns_the_same(name, groups, tmp_path, llama_references):
    check(name, {"num_query_groups": groups}, tmp_path, llama_references)
