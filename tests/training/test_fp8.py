"""FP8 training: the same numbers in every layout, nearly the losses of plain products."""

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch

from megalith.acceleration.fp8_utils import BlockwiseProduct
from megalith.config import load_run
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.errors import ConfigError
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megalith.training import build_model, machine_fit
from megalith.training.setup import RunParts, build_run
from tests.rank_pool import ranks
from tests.tiny_masked import write_sentences
from tests.tiny_run import EOD, VOCAB, settings
from tests.training.on_ranks import first_steps
from tests.training.outcomes import losses, run_here
from tests.training.reference import Trajectory, differences

MODEL = {
    "vocab_size": VOCAB,
    "num_layers": 3,
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 128,
}
SHARED = {"num_experts": 4, "shared_ffn_hidden_size": 256, "shared_expert_gate": True, "ffn_hidden_size": 64}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
T5 = {
    **MODEL,
    "vocab_size": 397,
    "num_query_groups": 4,
    "activation": "relu",
    "position_embedding_type": "relative",
    "relative_position": {"num_buckets": 8, "max_distance": 9},
    "attention": {"scale": 1.0},
    "t5": {"num_decoder_layers": 3},
}
DISCARDED = ["layernorm", "mlp_act"]
TWO_ROWS = {"global_batch_size": 4, "micro_batch_size": 2}


def in_8_bits(folder, **groups: Any) -> dict[str, Any]:
    fp8 = {"recipe": "blockwise", **groups.pop("fp8", {})}
    precision = {"dtype": "float64", **groups.pop("precision", {}), "fp8": fp8}
    model, train = MODEL | groups.pop("model", {}), TWO_ROWS | groups.pop("train", {})
    base = {"data": {"seq_length": 512}, "experimental": ["fp8"], **groups}
    return settings(folder, model=model, train=train, precision=precision, **base)


def plain(tree: dict[str, Any]) -> dict[str, Any]:
    precision = {"dtype": tree["precision"]["dtype"]}
    return {name: group for name, group in tree.items() if name != "experimental"} | {"precision": precision}


def steps(tree: dict[str, Any], world_size: int = 1) -> Trajectory:
    return ranks(world_size, first_steps, tree, world_size)[0]


@pytest.mark.parametrize(
    ("world_size", "parallel", "changes"),
    [
        (2, {"tensor": 2, "sequence": True}, {}),
        (2, {"context": 2}, {}),
        (2, {"shard": 2}, {"train": {"micro_batch_size": 1}}),
        pytest.param(1, {}, {"train": {"micro_batch_size": 4}}, marks=pytest.mark.slow),
        pytest.param(1, {}, {"train": {"recompute": "full"}}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param(2, {"pipeline": 2}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 2, "shard": 2}, {}, marks=pytest.mark.slow),
        pytest.param(2, {"context": 2, "context_method": "all_to_all"}, {}, marks=pytest.mark.slow),
        pytest.param(
            1, {}, {"train": {"recompute": "selective", "recompute_modules": DISCARDED}}, marks=pytest.mark.slow
        ),
        pytest.param(4, {"tensor": 2, "context": 2}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "tensor": 2, "sequence": True}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_compute_what_one_process_does(world_size, parallel, changes, tmp_path):
    kept = {"num_layers_at_end_in_bf16": 1}
    want = steps(in_8_bits(tmp_path, fp8=kept))
    got = steps(in_8_bits(tmp_path, fp8=kept, parallel=parallel, **changes), world_size)
    assert differences(got, want) == []


LATENTS = {"model": {"mla": LATENT, "num_query_groups": None, "kv_channels": None}}
OF_LATENTS = {"model": {"moe": {**SHARED, "latent_size": 64}}}
SHORT, LONG = ({"seq_length": size, "decoder_seq_length": size, "eod_mask_loss": False} for size in (128, 512))
SPLIT = {"tensor": 2, "sequence": True}


@pytest.mark.parametrize(
    ("changes", "parallel", "train"),
    [
        ({"model": {"moe": SHARED}}, SPLIT, {}),
        pytest.param({"model": {"moe": SHARED}}, {"expert": 2}, {}, marks=pytest.mark.slow),
        pytest.param(OF_LATENTS, SPLIT, {}, marks=pytest.mark.slow),
        pytest.param(LATENTS, SPLIT, {}, marks=pytest.mark.slow),
        pytest.param({"model": T5, "data": SHORT}, SPLIT, {}, marks=pytest.mark.slow),
        pytest.param({"model": T5, "data": SHORT}, {"shard": 2}, {"micro_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param({"model": T5, "data": LONG}, {"context": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_models_of_other_layers_are_split_alike(changes, parallel, train, tmp_path):
    if changes["model"] == T5:
        write_sentences(tmp_path)
    tree = in_8_bits(tmp_path, **changes)
    want = steps(tree)
    assert differences(steps({**in_8_bits(tmp_path, **changes, train=train), "parallel": parallel}, 2), want) == []
    without = steps(plain(tree))
    assert all(0.0 < abs(a - b) < 0.01 * b for a, b in zip(want.losses, without.losses, strict=True))


def write_cycles(prefix: Path) -> None:
    """Documents in which a token mostly determines the next one."""
    random = np.random.default_rng(0)
    follows = random.permutation(np.arange(1, VOCAB))
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(60):
            tokens = [int(random.integers(1, VOCAB))]
            while len(tokens) < 60:
                tokens.append(int(random.integers(1, VOCAB)) if random.random() < 0.2 else int(follows[tokens[-1] - 1]))
            builder.add_document(np.array([*tokens, EOD]))
        builder.finalize(vocab_size=VOCAB, eod=EOD)


def test_it_learns_as_plain_products_do(tmp_path):
    """The mean of the last losses is within 1 %, after most of the loss is gone."""
    write_cycles(tmp_path / "text")
    train = {"steps": 70, "global_batch_size": 4, "micro_batch_size": 4}
    groups = {"train": train, "data": {"seq_length": 128}, "optim": {"lr": 3e-3}, "precision": {"dtype": "float32"}}
    tree, found = in_8_bits(tmp_path, model={"num_layers": 2}, **groups), {}
    for name, one in (("in 8 bits", tree), ("plain", plain(tree))):
        ranks(1, run_here, {**one, "run": str(tmp_path / name)}, 1)
        found[name] = losses(tmp_path / name)
    in_8, without = (mean(found[name][-20:]) for name in ("in 8 bits", "plain"))
    assert without < found["plain"][0] / 3
    assert 0.0 < abs(in_8 - without) < 0.01 * without


def products_in_8_bits(tree: dict[str, Any]) -> dict[str, bool]:
    """Whether each linear layer of the model multiplies in 8 bits."""
    model = build_run(load_run(tree, world_size=1), torch.device("cpu")).chunks[0]
    return {
        name: isinstance(module.options.matrix_product, BlockwiseProduct)
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    }


def test_some_layers_are_left_out_and_all_that_are_no_layers(tmp_path):
    kept = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    [found] = ranks(1, products_in_8_bits, in_8_bits(tmp_path, model={"num_layers": 8}, fp8=kept))
    assert not found.pop("lm_head")
    assert {name for name, in_8 in found.items() if in_8} == {name for name in found if name.split(".")[2] in "12345"}


def test_a_run_without_such_products_here_is_refused(tmp_path, monkeypatch):
    config = load_run(in_8_bits(tmp_path), world_size=1)
    monkeypatch.setattr(build_model, "why_not_fp8", lambda device, dtype: "it is too old")
    for check in (
        lambda: machine_fit.check_machine(config, 1, range(1)),
        lambda: build_run(config, torch.device("cpu")),
    ):
        with pytest.raises(ConfigError, match=r"cannot run here: it is too old; remove precision\.fp8, and fp8 from"):
            check()


def test_the_fused_loss_is_that_of_plain_logits(tmp_path):
    fused, unfused = (steps(in_8_bits(tmp_path, train={"fused_linear_cross_entropy": on})) for on in (True, False))
    assert differences(fused, unfused) == []


def refused_with_a_product_of_its_own(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        build_run(load_run(tree, world_size=1), torch.device("cpu"), RunParts(matrix_product=torch.matmul))
    return str(error.value)


def test_a_product_of_the_users_own_is_not_overruled(tmp_path):
    [message] = ranks(1, refused_with_a_product_of_its_own, in_8_bits(tmp_path))
    assert "precision.fp8.recipe=blockwise and RunParts(matrix_product=...) both choose the product" in message
