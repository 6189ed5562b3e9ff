"""train.recompute_modules: the named parts are recomputed in backward and not saved, and no bit changes."""

import gc
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.setup import RunParts, build_run
from megalith.training.step import local_counts, sum_totals, train_step
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.transformer.attention import SelfAttention
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.mlp import MLP
from megalith.transformer.moe.shared_experts import SharedExpertMLP
from megalith.transformer.normalization import Normalization
from tests.live_memory import LiveMemory
from tests.rank_pool import ranks
from tests.sampling import sampled
from tests.tiny_run import GPT2, LLAMA, SEQ, settings
from tests.training.model_options_attn import ALL_AT_ONCE
from tests.training.model_options_mla import latent
from tests.training.on_ranks import first_steps
from tests.training.plugins import OtherSecondLayer
from tests.training.reference import differences, reference

CHOICES = [
    ["core_attn"],
    ["self_attn"],
    ["layernorm"],
    ["mlp"],
    ["mlp_act"],
    ["core_attn", "layernorm", "mlp_act"],
    ["self_attn", "layernorm", "mlp"],
]
OTHER = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}
LATENTS = latent(8)["model"]
SHAPES = {
    "llama": {},
    "gpt2 with dropout": OTHER,
    "options of attention": {"attention": ALL_AT_ONCE},
    "latents": LATENTS,
}
B, L, A, H, F = 8, LLAMA["num_layers"], LLAMA["num_attention_heads"], LLAMA["hidden_size"], LLAMA["ffn_hidden_size"]
HIDDEN = 8 * SEQ * B * H  # bytes of [S, B, H] in float64
INNER = 8 * SEQ * B * F
# the operations, by the module that computes them
OPERATIONS = {
    "core_attn": (DotProductAttention, "forward"),
    "self_attn": (SelfAttention, "forward"),
    "layernorm": (Normalization, "_normalize"),
    "mlp": (MLP, "forward"),
    "mlp_act": (MLP, "_activate"),
}


def named(names: Sequence[str]) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": [*names]}


def few(candidate: tuple[str, tuple[str, ...]]) -> set[Hashable]:
    """What `make test` covers once: each shape, each name."""
    model, names = candidate
    return {model, *names}


@pytest.mark.parametrize(("model", "names"), sampled([*product(SHAPES, map(tuple, CHOICES))], few))
def test_it_changes_no_bit_of_loss_gradients_and_weights(model, names, tmp_path):
    shape = SHAPES[model]
    [want] = ranks(1, first_steps, settings(tmp_path, model=shape), 1)
    [got] = ranks(1, first_steps, settings(tmp_path, model=shape, train=named(names)), 1)
    assert got.losses == want.losses
    assert got.norms == want.norms
    for these, those in zip([*got.gradients, got.final], [*want.gradients, want.final], strict=True):
        assert all(torch.equal(these[name], those[name]) for name in those)


def calls(tree: dict[str, Any]) -> Counter[str]:
    """How often each operation ran in a step of one micro-batch."""
    found: Counter[str] = Counter()

    def counted(name: str, kind: type, method: str) -> Any:
        plain = getattr(kind, method)

        def run(self: Any, *args: Any) -> Any:
            found[name] += 1
            return plain(self, *args)

        return patch.object(kind, method, run)

    with ExitStack() as stack:
        for name, (kind, method) in OPERATIONS.items():
            stack.enter_context(counted(name, kind, method))
        run = build_run(load_run(tree), torch.device("cpu"))
        micro_batches = run.loader.batch(0, B, B)
        train_step(run, micro_batches, sum_totals(run, local_counts(run, micro_batches), stop=False).counts)
    return found


# once per layer, and again where named; the first norm of each layer and the last norm of the model run alone, the
# others fused with the residual, and what is recomputed is the norm alone
ONCE = {"core_attn": L, "self_attn": L, "layernorm": L + 1, "mlp": L, "mlp_act": L}
AGAIN = {"core_attn": L, "self_attn": L, "layernorm": 2 * L, "mlp": L, "mlp_act": L}
INSIDE = {"self_attn": ["core_attn"], "mlp": ["mlp_act"]}


@pytest.mark.parametrize("names", CHOICES, ids="+".join)
def test_what_is_named_runs_again_once_and_nothing_else_does(names, tmp_path):
    [found] = ranks(1, calls, settings(tmp_path, train={"micro_batch_size": B} | named(names)))
    again = names + [inner for name in names for inner in INSIDE.get(name, [])]
    assert found == {name: ONCE[name] + (AGAIN[name] if name in again else 0) for name in ONCE}


def kept(tree: dict[str, Any]) -> int:
    """Bytes that are alive between forward and backward of one micro-batch on this rank."""
    run = build_run(load_run(tree, world_size=torch.distributed.get_world_size()), torch.device("cpu"))
    [batch] = run.loader.batch(0, B, B)
    inputs = run.task.inputs(batch, 0, run.device)
    for _ in range(2):  # the first forward allocates what stays: gathered weights, tables
        with LiveMemory() as memory:
            output = run.task.forward(run.chunks[0], inputs, None)
        gc.collect()  # free what only reference cycles hold
        found = memory.alive()
        output.sum().backward()
    return found


def test_what_is_named_is_not_kept(tmp_path):
    tree = settings(tmp_path, train={"micro_batch_size": B})
    [everything] = ranks(1, kept, tree)

    @cache
    def saved(*names: str) -> int:
        [found] = ranks(1, kept, {**tree, "train": tree["train"] | named([*names])})
        return everything - found

    assert saved("layernorm") == L * 2 * HIDDEN
    assert saved("mlp_act") == L * INNER
    # probabilities and masks of float64 attention, which is not fused
    assert saved("core_attn") > L * 8 * B * A * SEQ * SEQ
    assert saved("mlp") >= L * 3 * INNER
    assert saved("self_attn") > saved("core_attn") + L * 2 * HIDDEN
    assert saved("layernorm", "mlp_act") == saved("layernorm") + saved("mlp_act")
    # the inputs of what is recomputed are outputs of norms
    assert saved("layernorm", "mlp", "self_attn") == saved("mlp") + saved("self_attn") + L * 2 * HIDDEN


def test_of_norms_under_sequence_parallelism_what_ranks_gather_is_not_kept(tmp_path):
    tree = settings(tmp_path, train={"micro_batch_size": B}, parallel={"tensor": 2, "sequence": True})
    everything = ranks(2, kept, tree)
    found = ranks(2, kept, {**tree, "train": tree["train"] | named(["layernorm"])})
    # two inputs of each layer, with whole rows; a norm's own output, half of a row, is not kept anyway
    assert [more - less for more, less in zip(everything, found, strict=True)] == [L * 2 * HIDDEN] * 2


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_of_norms_no_latents_are_kept_nor_what_ranks_gather_of_them(tensor, tmp_path):
    parallel = {"tensor": tensor, "sequence": tensor > 1}
    tree = settings(tmp_path, model=LATENTS, train={"micro_batch_size": B}, parallel=parallel)
    everything = ranks(tensor, kept, tree)
    found = ranks(tensor, kept, {**tree, "train": tree["train"] | named(["layernorm"])})
    # the inputs of attention, a rank's own tokens, and of the mlp; latents of 8, and of 12 with a key of 4
    want = L * (HIDDEN // tensor + HIDDEN + HIDDEN // H * (8 + 12 + 4))
    assert [more - less for more, less in zip(everything, found, strict=True)] == [want] * tensor


PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
LAYOUTS = [
    ({"tensor": 2, "sequence": True}, ["layernorm", "mlp_act", "core_attn"]),
    ({"tensor": 2}, ["layernorm", "mlp"]),
    ({"shard": 2}, ["layernorm", "mlp_act"]),
    ({"context": 2}, ["layernorm", "self_attn", "mlp_act"]),
    ({"pipeline": 2, "virtual": 2}, ["layernorm", "mlp_act", "core_attn"]),
    ({"tensor": 2, "sequence": True, "shard": 2}, ["layernorm", "self_attn", "mlp"]),
    ({"tensor": 2, "sequence": True, "context": 2}, ["layernorm", "mlp_act"]),
    ({"pipeline": 2, "tensor": 2, "sequence": True}, ["layernorm", "mlp_act"]),
    ({"pipeline": 2, "context": 2, "shard": 2}, ["layernorm", "self_attn", "mlp"]),
]


@pytest.mark.slow  # `make test` has layouts of test_layout_cover.py with selective recomputation
@pytest.mark.parametrize(("parallel", "names"), LAYOUTS, ids=str)
def test_it_computes_what_one_process_does(parallel, names, tmp_path):
    model = {**OTHER, "num_layers": 4}
    tree = settings(tmp_path, model=model, parallel=parallel, data=PACKED, train=named(names))
    want = reference({name: group for name, group in tree.items() if name != "parallel"})
    size = 1
    for name in ("tensor", "context", "pipeline", "shard"):
        size *= parallel.get(name, 1)
    for rank, found in enumerate(ranks(size, first_steps, tree, size)):
        assert differences(found, want) == [], f"on rank {rank}"


class Linears(OtherSecondLayer):
    """A model without Megalith's attention and feed-forward modules."""

    def build_model(self, options: Any, stage: Any = None) -> Any:
        model = super().build_model(options, stage)
        for layer in model.layers():
            layer.self_attn = layer.mlp = torch.nn.Identity()
        return model


def refusal(tree: dict[str, Any]) -> str:
    config = load_run(tree)
    with pytest.raises(ConfigError) as refused:
        build_run(config, torch.device("cpu"), RunParts(Linears(config)))
    return str(refused.value)


def test_an_operation_that_the_model_has_not_is_refused(tmp_path):
    [message] = ranks(1, refusal, settings(tmp_path, train=named(["mlp", "layernorm", "core_attn"])))
    assert message == ("train.recompute_modules lists mlp, core_attn, but this GPTModel has none; use layernorm")


EXPERTS_IN_STAGE_1 = {**LLAMA, "moe": {"num_experts": 4, "layers": [False, True]}}


@pytest.mark.parametrize("name", ["moe", "moe_act", "mlp"])
def test_what_one_stage_alone_has_is_computed_again_there(name, tmp_path):
    tree = settings(tmp_path, model=EXPERTS_IN_STAGE_1, parallel={"pipeline": 2}, train=named([name]))
    want = reference({group: fields for group, fields in tree.items() if group != "parallel"})
    for rank, found in enumerate(ranks(2, first_steps, tree, 2)):
        assert differences(found, want) == [], f"on rank {rank}"


def refusal_of_stage(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        build_run(load_run(tree, world_size=2), torch.device("cpu"))
    assert refused.value.on_every_rank
    return str(refused.value)


def test_what_no_stage_has_is_refused_with_the_names_of_all_stages(tmp_path):
    tree = settings(tmp_path, model=EXPERTS_IN_STAGE_1, parallel={"pipeline": 2}, train=named(["shared_experts"]))
    message, again = ranks(2, refusal_of_stage, tree)
    assert message == again
    assert message.startswith("train.recompute_modules lists shared_experts, but this GPTModel has none; use ")
    assert {"mlp", "moe", "moe_act", "core_attn"} <= set(message.partition("; use ")[2].split(", "))


def test_shared_experts_are_no_mlp_of_their_own(tmp_path):
    model = {**LLAMA, "moe": {"num_experts": 4, "layers": [False, True], "shared_ffn_hidden_size": 16}}
    config = load_run(settings(tmp_path, model=model))
    found = PretrainGPT(config).build_model(BuildOptions(ProcessGroupCollection.single())).recomputable()
    assert {name: len(found[name]) for name in ("mlp", "moe", "shared_experts")} == {
        "mlp": 1,
        "moe": 1,
        "shared_experts": 1,
    }
    assert not any(isinstance(module, SharedExpertMLP) for module in found["mlp"])
