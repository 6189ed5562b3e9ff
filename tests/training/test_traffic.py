"""step_traffic: what gloo ranks exchange in a step, by collective and byte, on every axis."""

import shutil
from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.parallel.traffic import Collective, Traffic
from megalith.topology.rank_groups import ParallelState
from megalith.torch_compat.compiler import watch_compiler
from megalith.training import setup
from megalith.training.run import Run
from megalith.training.setup import build_run
from megalith.training.step import local_counts, sum_totals, train_step
from megalith.training.tasks.choose import task_of
from megalith.training.traffic import busiest_rank, step_traffic
from tests.rank_pool import ranks, renew_ranks
from tests.tiny_run import GPT2, LLAMA, settings
from tests.training.layout_cover import layouts, name_of, settings_of, world_size
from tests.training.model_options_mla import latent
from tests.training.recorder import APART, Recorder, axis_of
from tests.training.test_layouts import FOR_GPT2, LAYOUTS, SHARED_GROUPS

SHAPES = {"llama": {}, "gpt2": {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}}
# each axis once, context by each of its methods except the ring, which multi-latent attention has below; recomputation
# is with shared groups and other settings below
IN_MAKE_TEST = [
    ("shard 2", "llama"),
    ("replicate 2", "llama"),
    ("tensor 2, sequence", "llama"),
    ("pipeline 2, zb_v, five layers", "llama"),
    ("context 2, gathered, packed", "llama"),
    ("context 2, heads traded, packed, recompute", "llama"),
    ("context 4, two levels", "llama"),
    ("pipeline 2", "gpt2"),
]
COMPILED = [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}, {"shard": 2}]


@pytest.fixture(autouse=True, scope="module")
def new_ranks() -> None:
    """DTensor may reuse the mesh of an earlier run in the same process, whose groups the recorder cannot tell apart."""
    renew_ranks()


def exchanged(tree: dict[str, Any], num_ranks: int) -> tuple[Traffic, Traffic]:
    """What this rank exchanges in the second step, recorded and counted ahead."""
    config = load_run(tree, world_size=num_ranks)
    with patch.object(setup, "ParallelState", partial(ParallelState, group_options=APART)):
        run = build_run(config, torch.device("cpu"))
    take_step(run)  # FSDP2 initializes lazily in the first
    recorder, before = Recorder(), num_operations()
    with recorder:
        labels = take_step(run)
    assert recorder.found.total() == (num_operations() - before).total(), "the recorder has missed some"
    return recorder.found, step_traffic(config, run.task, num_ranks, dist.get_rank(), labels)


def take_step(run: Run) -> list[int]:
    """Returns how many tokens of each micro-batch this rank predicts."""
    consumed = run.state.consumed_samples
    sizes = run.microbatches.global_batch_size(consumed), run.config.train.micro_batch_size
    micro_batches = run.loader.batch(consumed, *sizes)
    train_step(run, micro_batches, sum_totals(run, local_counts(run, micro_batches), stop=False).counts)
    return [run.task.counts(batch)[next(iter(run.task.terms))] for batch in micro_batches]


def num_operations() -> Counter[str]:
    """Collectives and messages of this rank, by axis, from gloo's own count."""
    found = Counter[str]()
    for group in dist.distributed_c10d._world.pg_map:
        found[axis_of(group)] += group._get_sequence_number_for_group()
    return found


def check(tree: dict[str, Any], num_ranks: int) -> None:
    messages = {"send": Counter[Collective](), "receive": Counter[Collective]()}
    for rank, (found, counted) in enumerate(ranks(num_ranks, exchanged, tree, num_ranks)):
        for kind, of_all in messages.items():
            of_all.update({each._replace(kind=""): times for each, times in found.items() if each.kind == kind})
        recorded = {each: times for each, times in found.items() if each.kind != "receive"}
        assert recorded == counted, f"on rank {rank}"
    assert messages["send"] == messages["receive"]


def sample(names: list[str], shape: str) -> list[Any]:
    quick = [name for name, of in IN_MAKE_TEST if of == shape]
    return [
        pytest.param(name, shape, id=f"{shape}: {name}", marks=[] if name in quick else [pytest.mark.slow])
        for name in names
        if LAYOUTS[name][0] > 1
    ]


@pytest.mark.parametrize(("name", "shape"), [*sample([*LAYOUTS], "llama"), *sample(FOR_GPT2, "gpt2")])
def test_ranks_exchange_what_is_counted(name, shape, tmp_path):
    num_ranks, groups = LAYOUTS[name]
    model = {**SHAPES[shape], **groups.get("model", {})}
    check(settings(tmp_path, **{**groups, "model": model}), num_ranks)


@pytest.mark.parametrize(
    ("name", "groups"),
    [pytest.param(*each, marks=[] if number == 0 else [pytest.mark.slow]) for number, each in enumerate(SHARED_GROUPS)],
)
def test_ranks_that_share_a_group_of_heads_exchange_what_is_counted(name, groups, tmp_path):
    num_ranks, settings_groups = LAYOUTS[name]
    model = {**SHAPES["gpt2"], "num_query_groups": groups}
    check(settings(tmp_path, **{**settings_groups, "model": model}), num_ranks)


@pytest.mark.parametrize(
    "name",
    [
        "tensor 2, sequence",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("shard 2", "tensor 4", "tensor 2 x context 2, heads traded", "pipeline 2")
        ),
    ],
)
@pytest.mark.parametrize(
    "attention",
    [
        {"softmax": "learnable", "qk_norm": "LayerNorm", "output_gate": True, "qkv_bias": True, "logit_softcap": 5.0},
        pytest.param({"qk_norm": "L2", "softmax": "off_by_one", "output_bias": True}, marks=pytest.mark.slow),
    ],
)
def test_ranks_exchange_what_is_counted_with_options_of_attention(name, attention, tmp_path):
    num_ranks, groups = LAYOUTS[name]
    check(settings(tmp_path, **{**groups, "model": {**SHAPES["llama"], "attention": attention}}), num_ranks)


# `make test` takes the first: values that are exchanged separately from keys
LATENTS = [
    ("context 2", {"q_lora_rank": 8}),
    ("tensor 2, sequence", {}),
    ("tensor 2, sequence, packed, recompute", {"q_lora_rank": 8}),
    ("tensor 2", {"q_lora_rank": 8}),
    ("tensor 2 x shard 2, selective", {"q_lora_rank": 8}),
    ("context 2, gathered, packed", {}),
    ("context 2, heads traded, packed, recompute", {"q_lora_rank": 8}),
    ("context 4, two levels", {}),
    ("tensor 2 x context 2, heads traded", {"q_lora_rank": 8}),
    ("hybrid 2 x 2", {"q_lora_rank": 8}),
    ("pipeline 2", {}),
]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param(*each, marks=[] if number == 0 else [pytest.mark.slow]) for number, each in enumerate(LATENTS)],
)
def test_ranks_exchange_what_is_counted_with_latent_attention(name, sizes, tmp_path):
    num_ranks, groups = LAYOUTS[name]
    model = {**SHAPES["llama"], **latent()["model"], **groups.get("model", {})}
    model["mla"] = {**model["mla"], **sizes}
    check(settings(tmp_path, **{**groups, "model": {**model, "attention": {"qkv_bias": True}}}), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("modules", [["layernorm"], ["self_attn", "layernorm"], ["core_attn", "layernorm", "mlp"]])
@pytest.mark.parametrize("q_lora_rank", [None, 8])
def test_ranks_exchange_what_is_counted_where_latents_are_computed_again(modules, q_lora_rank, tmp_path):
    train = {"recompute": "selective", "recompute_modules": modules}
    tree = settings(tmp_path, **latent(q_lora_rank), train=train, parallel={"tensor": 2, "sequence": True})
    check(tree, 2)


@pytest.mark.parametrize(
    ("name", "batch_size", "micro_batch_size"),
    [
        ("tensor 2, sequence", 8, 8),  # gradients that were not accumulated are summed over tp as they are
        pytest.param("tensor 2, sequence", 8, 2, marks=pytest.mark.slow),
        pytest.param("hybrid 2 x 2", 32, 8, marks=pytest.mark.slow),
        pytest.param("context 2", 8, 2, marks=pytest.mark.slow),
        pytest.param("pipeline 2 x shard 2, interleaved", 32, 2, marks=pytest.mark.slow),
    ],
)
def test_a_computation_in_16_bits_exchanges_what_is_counted(name, batch_size, micro_batch_size, tmp_path):
    num_ranks, groups = LAYOUTS[name]
    train = {"micro_batch_size": micro_batch_size, "global_batch_size": batch_size}
    check(settings(tmp_path, **{**groups, "train": train, "precision": {"dtype": "bfloat16"}}), num_ranks)


def exchanged_when_compiled(tree: dict[str, Any], num_ranks: int) -> tuple[Counter[str], Counter[str]]:
    """How often this rank exchanges something in the third step, by axis: from gloo's own count, and counted ahead.

    Nothing is recorded: torch.compile runs code eagerly while a dispatch mode such as the recorder is entered.
    """
    config = load_run(tree, world_size=num_ranks)
    with patch.object(setup, "ParallelState", partial(ParallelState, group_options=APART)):
        run = build_run(config, torch.device("cpu"))
    builds: list[str] = []
    with watch_compiler(partial(builds.append, "started"), partial(builds.append, "ended")):
        for _ in range(2):
            take_step(run)
    assert builds, "nothing was compiled"
    before = num_operations()
    take_step(run)
    counted = Counter[str]()
    for each, times in step_traffic(config, run.task, num_ranks, dist.get_rank()).items():
        counted[each.axis] += times * (2 if each.kind == "send" else 1)  # gloo counts what is received as well
    return num_operations() - before, counted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.parametrize(
    "parallel", [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}, {"shard": 2}], ids=str
)
def test_compiled_layers_exchange_what_is_counted(parallel, tmp_path):
    train = {"compile": True}
    tree = settings(tmp_path, parallel=parallel, train=train, experimental=["compile"], precision={"dtype": "float32"})
    try:
        for rank, (found, counted) in enumerate(ranks(2, exchanged_when_compiled, tree, 2, timeout=400)):
            assert found == counted, f"on rank {rank}"
    finally:
        renew_ranks()  # a compiler leaves threads and workers behind


# settings of layers, and what they affect: weights, recomputation, bytes between stages
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("tensor 2, sequence", {"model": {"residual": {"norm_placement": "sandwich"}}, "train": {"recompute": "full"}}),
    ("pipeline 2", {"model": {"residual": {"fp32": True}}, "precision": {"dtype": "bfloat16"}}),
    ("tensor 2, sequence", {"model": {"residual": {"norm_placement": "post"}}, "train": {"recompute": "full"}}),
    ("tensor 2, sequence", {"model": {"residual": {"norm_placement": "post"}, "normalization": "LayerNorm"}}),
    (
        "tensor 2, sequence",
        {
            "model": {"residual": {"norm_placement": "post"}},
            "train": {"recompute": "selective", "recompute_modules": ["layernorm", "mlp"]},
        },
    ),
    ("tensor 2, sequence", {"model": {"mlp_bias": True, "activation": "squared_relu"}}),
    ("tensor 2 x shard 2, sequence, packed", {"model": {"mlp_bias": True, "activation": "geglu"}}),
    ("tensor 2", {"model": {"add_bias_linear": True, "mlp_bias": False}}),
    ("pipeline 2 x tensor 2, sequence", {"model": {"residual": {"norm_placement": "post"}}}),
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(*each, marks=[] if number < 2 else [pytest.mark.slow]) for number, each in enumerate(LAYERS)],
)
def test_layers_of_other_settings_exchange_what_is_counted(name, changes, tmp_path):
    num_ranks, groups = LAYOUTS[name]
    check(settings(tmp_path, **{**groups, **changes}), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in layouts(0) if world_size(row) > 1], ids=name_of)
def test_ranks_exchange_what_is_counted_wherever_two_settings_meet(row, tmp_path):
    check(settings(tmp_path, **settings_of(row)), world_size(row))


def counted(tmp_path: Any, num_ranks: int, **groups: Any) -> Traffic:
    config = load_run(settings(tmp_path, **groups), world_size=num_ranks)
    return step_traffic(config, task_of(config), num_ranks, 0)


def bytes_of(traffic: Traffic, axis: str, *kinds: str) -> int:
    return sum(each.num_bytes * times for each, times in traffic.items() if each.axis == axis and each.kind in kinds)


def test_a_layer_of_tensor_parallelism_has_the_four_all_reduces_of_megatron(tmp_path):
    # Narayanan et al. 2021, arXiv:2104.04473, section 3.2: [S, B, H] twice in forward, twice in backward, per layer
    more, fewer = (
        counted(tmp_path, 2, parallel={"tensor": 2}, model={**LLAMA, "num_layers": layers}) for layers in (3, 2)
    )
    num_micro_batches = 4
    assert more - fewer == {Collective("tensor", "all_reduce", 16 * 2 * 32 * 8): 4 * num_micro_batches}


def test_sequence_parallelism_sends_the_bytes_of_tensor_parallelism(tmp_path):
    # Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather
    layers = []
    for sequence in (False, True):
        parallel = {"tensor": 2, "sequence": sequence}
        more, fewer = (
            counted(tmp_path, 2, parallel=parallel, model={**LLAMA, "num_layers": number}) for number in (3, 2)
        )
        layers.append(more - fewer)
    halves = {kind: bytes_of(layers[1], "tensor", kind) for kind in ("all_gather", "reduce_scatter")}
    assert halves["all_gather"] == halves["reduce_scatter"] == bytes_of(layers[0], "tensor", "all_reduce")


def test_sharded_layers_are_gathered_twice_and_reduced_once(tmp_path):
    # Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7: three times the parameters, instead of twice
    train = {"global_batch_size": 4, "micro_batch_size": 2}
    more, fewer = (
        counted(tmp_path, 2, model={**LLAMA, "num_layers": layers}, train=train, precision={"dtype": "float32"})
        for layers in (3, 2)
    )
    layer = 4 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32)
    one_more = more - fewer
    assert bytes_of(one_more, "shard", "all_gather") == 2 * layer
    assert bytes_of(one_more, "shard", "reduce_scatter") == layer


def test_the_busiest_rank_is_in_the_stage_with_the_most_bytes(tmp_path):
    parallel = {"pipeline": 2, "tensor": 2, "stage_layers": [1, 3]}
    tree = settings(tmp_path, parallel=parallel, model={**LLAMA, "num_layers": 4})
    config = load_run(tree, world_size=8)
    task = task_of(config)
    rank, traffic = busiest_rank(config, task, 8)
    assert rank == 4
    assert traffic == step_traffic(config, task, 8, 4)
    sizes = [
        sum(each.num_bytes * times for each, times in step_traffic(config, task, 8, other).items())
        for other in range(8)
    ]
    assert sizes.index(max(sizes)) == rank


def test_one_rank_exchanges_nothing(tmp_path):
    assert counted(tmp_path, 1) == Counter()
