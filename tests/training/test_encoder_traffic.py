"""step_traffic of a BERT and a T5: what gloo ranks exchange in a step, with the actual number of masked tokens."""

from typing import Any

import pytest

from megalith.config import load_run
from megalith.parallel.traffic import Collective, Traffic, enlarged
from megalith.training import dry_run
from megalith.training.dry_run import describe
from megalith.training.tasks.choose import task_of
from megalith.training.traffic import step_traffic
from tests.rank_pool import renew_ranks
from tests.tiny_masked import masked_settings
from tests.tiny_pairs import embedding_settings
from tests.training.tasks.test_finetune_classification import labelled_settings
from tests.training.tasks.test_pretrain_t5 import t5_settings
from tests.training.test_bert_layouts import LAYOUTS as BERT_LAYOUTS
from tests.training.test_t5_layouts import LAYOUTS as T5_LAYOUTS
from tests.training.test_traffic import check

BERT_OPTIONS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm, rope, untied, without a binary head": {
        "model": {
            "residual": {},
            "position_embedding_type": "rope",
            "tie_word_embeddings": False,
            "bert": {"num_token_types": 0, "binary_head": False},
        },
        "train": {"recompute": "full"},
    },
    "positions after two rows, 16 bits, the fused loss": {
        "model": {"bert": {"num_token_types": 3, "position_offset": 2}, "normalization": "RMSNorm"},
        "train": {"fused_linear_cross_entropy": True, "recompute": "selective", "recompute_modules": ["layernorm"]},
        "precision": {"dtype": "bfloat16"},
    },
}
T5_OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, post-norm, gated": {
        "model": {"tie_word_embeddings": False, "residual": {"norm_placement": "post"}, "activation": "geglu_tanh"}
    },
    "computed again, LayerNorm, biases, sandwich": {
        "model": {
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "residual": {"norm_placement": "sandwich"},
            "hidden_dropout": 0.0,
        },
        "train": {"recompute": "full"},
    },
    "parts computed again, 16 bits": {
        "model": {"residual": {"fp32": True}, "hidden_dropout": 0.0},
        "train": {"recompute": "selective", "recompute_modules": ["cross_attn", "layernorm", "core_attn"]},
        "precision": {"dtype": "bfloat16"},
    },
    "without dropout, computed again": {
        "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "train": {"recompute": "full"},
    },
}
# `make test` has each axis except cp once, as in test_traffic.py for GPT; all others are slow
BERT_FAST = {("pre-norm, rope, untied, without a binary head", "tensor 2"), ("post-norm", "pipeline 2, uneven")}
BERT_FAST |= {("positions after two rows, 16 bits, the fused loss", "shard 2")}
T5_FAST = {("tied", "pipeline 2, cut in the encoder"), ("parts computed again, 16 bits", "tensor 2, sequence")}


def cases(options: dict[str, Any], layouts: dict[str, Any], fast: set[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(option, layout, marks=() if (option, layout) in fast else pytest.mark.slow)
        for option in options
        for layout in layouts
        # a schedule that splits backwards has no fused loss and no recomputation
        if not (layout == "pipeline 2, a V" and "train" in options[option])
    ]


@pytest.fixture(autouse=True, scope="module")
def new_ranks() -> None:
    """As in test_traffic."""
    renew_ranks()


@pytest.mark.parametrize(("option", "layout"), cases(BERT_OPTIONS, BERT_LAYOUTS, BERT_FAST))
def test_ranks_exchange_what_is_counted_of_a_bert(option, layout, tmp_path):
    num_ranks, parallel = BERT_LAYOUTS[layout]
    groups = BERT_OPTIONS[option]
    model = {"num_layers": 3, **groups.get("model", {})}
    check(masked_settings(tmp_path, **{**groups, "model": model, "parallel": parallel}), num_ranks)


@pytest.mark.parametrize(
    ("layout", "pooling"),
    [
        ("tensor 2, sequence", "first"),
        ("context 2", "mean"),
        pytest.param("shard 2 x tensor 2", "first", marks=pytest.mark.slow),
        pytest.param("context 2 x tensor 2, sequence", "mean", marks=pytest.mark.slow),
    ],
)
def test_ranks_exchange_what_is_counted_of_a_classifier(layout, pooling, tmp_path):
    num_ranks, parallel = BERT_LAYOUTS[layout]
    tree = labelled_settings(tmp_path, parallel=parallel)
    tree["model"]["bert"]["classifier_pooling"] = pooling
    if pooling == "mean":  # summed in float32
        tree["precision"] = {"dtype": "bfloat16"}
    check(tree, num_ranks)


@pytest.mark.parametrize(
    ("layout", "micro_batch_size"),
    [
        ("shard 2", 2),
        pytest.param("shard 2", 4, marks=pytest.mark.slow),  # in one pass
        pytest.param("tensor 2, sequence", 2, marks=pytest.mark.slow),
        pytest.param("pipeline 2, uneven", 2, marks=pytest.mark.slow),
        pytest.param("context 2", 2, marks=pytest.mark.slow),
        pytest.param("context 2 x tensor 2, sequence", 2, marks=pytest.mark.slow),
        pytest.param("shard 2 x tensor 2", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_ranks_exchange_what_is_counted_of_an_embedding_model(dtype, layout, micro_batch_size, tmp_path):
    num_ranks, parallel = BERT_LAYOUTS[layout]
    tree = embedding_settings(tmp_path, {"embedding_size": 8}, parallel=parallel)
    tree["model"]["num_layers"] = 3
    tree["train"]["micro_batch_size"], tree["precision"] = micro_batch_size, {"dtype": dtype}
    check(tree, num_ranks)


@pytest.mark.parametrize(("option", "layout"), cases(T5_OPTIONS, T5_LAYOUTS, T5_FAST))
def test_ranks_exchange_what_is_counted_of_a_t5(option, layout, tmp_path):
    num_ranks, parallel = T5_LAYOUTS[layout]
    groups = T5_OPTIONS[option]
    tree = t5_settings(tmp_path, **{**groups, "parallel": parallel})
    tree["model"] |= {"t5": {"num_decoder_layers": 3}, **groups.get("model", {})}
    check(tree, num_ranks)


def counted(tree: dict[str, Any], num_ranks: int, labels: list[int] | None = None) -> Traffic:
    config = load_run(tree, world_size=num_ranks)
    return step_traffic(config, task_of(config), num_ranks, 0, labels)


def test_a_masked_token_exchanges_three_numbers_and_a_gradient(tmp_path):
    # forward: a maximum, a sum and a logit from each of two ranks, in float64; backward: the gradient of what is read
    # out
    tree = masked_settings(tmp_path, parallel={"tensor": 2})
    one, two = (counted(tree, 2, [number] * 4) for number in (7, 11))
    assert one - two == {
        Collective("tensor", "all_gather", 7 * 3 * 8 * 2): 4,
        Collective("tensor", "all_reduce", 7 * 32 * 8): 4,
    }
    assert enlarged(one - two, 0) == {}


def test_a_layer_of_a_decoder_lets_what_the_encoder_gives_enter_once_more(tmp_path):
    # 32 tokens of the encoder and 16 of the decoder: self-attention, cross-attention and feed-forward leave the region
    # in forward and enter it in backward; the encoder's output enters separately; 4 micro-batches of 2 rows in float64
    tree = t5_settings(tmp_path, parallel={"tensor": 2})
    more = {**tree, "model": {**tree["model"], "t5": {"num_decoder_layers": 3}}}
    encoder, decoder = (tokens * 2 * 32 * 8 for tokens in (32, 16))
    assert task_of(load_run(tree, world_size=2)).decoder_seq_length == 16
    assert counted(more, 2) - counted(tree, 2) == {
        Collective("tensor", "all_reduce", encoder): 4,
        Collective("tensor", "all_reduce", decoder): 6 * 4,
    }


def test_a_dry_run_tells_of_how_many_masked_tokens_it_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "_memory", lambda *_: "not counted here, which takes seconds")
    # 15 % of 2 rows of 32 tokens
    text = describe(load_run(masked_settings(tmp_path, parallel={"tensor": 2}), world_size=2), 2)
    assert "traffic per step      of rank 0, the busiest, with 10 predicted tokens per micro-batch; sizes" in text
    text = describe(load_run(t5_settings(tmp_path, parallel={"tensor": 2}), world_size=2), 2)
    assert "traffic per step      of rank 0, the busiest; sizes" in text
