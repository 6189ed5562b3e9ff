"""Two stacks learn in every layout what they learn in one process: padded and packed rows, float64, two steps.

One process is checked elsewhere: against single pairs of rows in tests/models/test_t5_model.py, and against
transformers in tests/models/hf/test_t5.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run
from megalith.models.sampling import Sampling
from megalith.models.t5_generation import beam_search, generate
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.parallel.context import attention as context_attention
from megalith.parallel.context import partial_attention, relative_bias
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.topology import collectives
from megalith.training.setup import RunParts, build_run
from megalith.transformer import cross_attention, dropout, mlp
from megalith.transformer.encoder_output import PairedDocuments
from tests.rank_pool import ranks
from tests.tiny_run import VOCAB, settings
from tests.training.on_ranks import first_steps
from tests.training.outcomes import losses, run_here
from tests.training.reference import Trajectory, differences
from tests.training.spans_task import PredictSpans

T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 6,
    "ffn_hidden_size": 40,
    "activation": "relu",
    "position_embedding_type": "relative",
    "relative_position": {"num_buckets": 8, "max_distance": 9},
    "attention": {"scale": 1.0},
    "tie_word_embeddings": True,
    "multipliers": {"logits": 32**-0.5},
    "t5": {"num_decoder_layers": 3},
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.1,
}
NAMED = ["cross_attn", "mlp_act", "layernorm", "core_attn"]
OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {"model": T5},
    "gated, untied, packed": {
        "model": T5 | {"activation": "geglu_tanh", "tie_word_embeddings": False, "multipliers": {}},
        "data": {"reset_attention_mask": True},
        "train": {"fused_linear_cross_entropy": True},
    },
    "layers computed again": {"model": T5, "train": {"recompute": "full"}},
    "parts computed again": {"model": T5, "train": {"recompute": "selective", "recompute_modules": NAMED}},
    "without dropout": {"model": T5 | {"hidden_dropout": 0.0, "attention_dropout": 0.0}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2, cut in the decoder": (2, {"pipeline": 2, "stage_layers": [3, 2]}),
    "pipeline 2, cut in the encoder": (2, {"pipeline": 2, "stage_layers": [1, 4]}),
    "pipeline 2, encoder and decoder": (2, {"pipeline": 2, "stage_layers": [2, 3]}),
    "pipeline 2, interleaved": (2, {"pipeline": 2, "virtual": 2, "schedule": "interleaved"}),
    "pipeline 2, a V": (2, {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}),
    "context 2": (2, {"context": 2}),
    "context 2, all_gather": (2, {"context": 2, "context_method": "all_gather"}),
    "context 2, all_to_all": (2, {"context": 2, "context_method": "all_to_all"}),
    "shard 2": (2, {"shard": 2}),
    "pipeline 4": (4, {"pipeline": 4, "stage_layers": [1, 1, 1, 2]}),
    "tensor 2, sequence x pipeline 2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
    "context 2 x tensor 2, sequence": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "context 2 x pipeline 2": (4, {"context": 2, "pipeline": 2, "stage_layers": [1, 4]}),
    "shard 2 x pipeline 2": (4, {"shard": 2, "pipeline": 2, "stage_layers": [3, 2]}),
    "shard 2 x tensor 2": (4, {"shard": 2, "tensor": 2}),
    "replicate 2 x context 2": (4, {"replicate": 2, "context": 2}),
}
# `make test` takes each kind of layout of two ranks once, with one option after another; tests/insight/verify covers cp
FAST = {
    ("padded", "pipeline 2, cut in the encoder"),
    ("gated, untied, packed", "pipeline 2, interleaved"),
    ("parts computed again", "tensor 2, sequence"),
    ("layers computed again", "shard 2"),
}
CASES = [
    pytest.param(option, layout, marks=() if (option, layout) in FAST else pytest.mark.slow)
    for option in OPTIONS
    for layout in LAYOUTS
    # a schedule that splits backwards has no fused loss
    if not (layout == "pipeline 2, a V" and "fused_linear_cross_entropy" in OPTIONS[option].get("train", {}))
]


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    return first_steps(tree, world_size, task=PredictSpans)


def of_one_process(tree: dict[str, Any]) -> Trajectory:
    """One process with whole batches and no recomputation."""
    train = {name: value for name, value in tree["train"].items() if not name.startswith("recompute")}
    alone = {**tree, "train": {**train, "micro_batch_size": train["global_batch_size"]}}
    alone.pop("parallel", None)
    [want] = ranks(1, steps, alone, 1)
    return want


@pytest.mark.parametrize(("option", "layout"), CASES)
def test_two_stacks_learn_the_same_in_every_layout(option, layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, **OPTIONS[option])
    want = of_one_process(tree)
    for rank, found in enumerate(ranks(num_ranks, steps, {**tree, "parallel": parallel}, num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"


def answers(tree: dict[str, Any], world_size: int) -> list[list[list[int]]]:
    """Greedy, sampled and beam-search answers."""
    config = load_run(tree, world_size=world_size)
    run = build_run(config, torch.device("cpu"), RunParts(task=PredictSpans(config)))
    prompts = [[3, 14, 15, 9, 2, 6], [26], [4, 6, 2]]
    drawn = [generate(run.pipeline, prompts, 6, start_token=0, sampling=Sampling(t)) for t in (0.0, 2.0)]
    return [*drawn, beam_search(run.pipeline, prompts, 6, start_token=0, num_beams=3, end_tokens=[5])]


WHOLE_ROWS = [
    pytest.param(layout, marks=() if layout == "pipeline 2, cut in the encoder" else pytest.mark.slow)
    for layout, (_, parallel) in LAYOUTS.items()
    if not parallel.keys() & {"sequence", "context"}
]


@pytest.mark.parametrize("layout", WHOLE_ROWS)
def test_answers_are_the_same_in_every_layout_of_whole_rows(layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, **OPTIONS["padded"])
    [want] = ranks(1, answers, tree, 1)
    assert ranks(num_ranks, answers, {**tree, "parallel": parallel}, num_ranks) == [want] * num_ranks


def forget_to_sum_the_tables_of_stages() -> Any:
    return patch.object(Pipeline, "_sum_shared_gradients", lambda self: None)


def let_the_decoder_attend_to_padding() -> Any:
    seen = PairedDocuments.seen
    return patch.object(PairedDocuments, "seen", lambda self, positions: torch.ones_like(seen(self, positions)))


def draw_masks_by_the_rank() -> Any:
    keyed = dropout.sequence_parallel_key

    def own(key: Any, group: Any) -> Any:
        found = keyed(key, group)
        return found if group is None else replace(found, seed=found.seed + group.rank())

    return patch("megalith.models.language_model.sequence_parallel_key", own)


def count_inner_features_from_each_ranks_first() -> Any:
    return patch.object(mlp, "chunk_range", lambda size, parts, index: (0, size // parts))


def take_distances_within_a_block() -> Any:
    between = relative_bias.bias_between

    def own(by_distance: Any, queries: range, keys: range) -> Any:
        return between(by_distance, range(len(queries)), range(len(keys)))

    return patch.object(partial_attention, "bias_between", own)


def bias_every_ranks_heads_as_the_first_ones() -> Any:
    trade = context_attention._HeadTrade
    return patch.object(trade, "of_heads", lambda self, x: x.chunk(self.inner)[0])


def leave_the_encoders_rows_in_the_order_of_ranks() -> Any:
    return patch.object(cross_attention, "zigzag_join", lambda parts, size: parts)


def keep_a_ranks_gradient_of_gathered_keys() -> Any:
    gather = collectives.gather_from_sequence_parallel_region

    def own(x: Any, group: Any) -> Any:
        return gather(x, group, tensor_parallel_output_grad=False)

    return patch.object(cross_attention, "gather_from_sequence_parallel_region", own)


CUT = {"pipeline": 2, "stage_layers": [1, 4]}
FAULTS: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (forget_to_sum_the_tables_of_stages, "gated, untied, packed", CUT),
    (let_the_decoder_attend_to_padding, "padded", {"shard": 2}),
    (draw_masks_by_the_rank, "padded", {"tensor": 2, "sequence": True}),
    (count_inner_features_from_each_ranks_first, "padded", {"tensor": 2}),
    (take_distances_within_a_block, "padded", {"context": 2}),
    (bias_every_ranks_heads_as_the_first_ones, "padded", {"context": 2, "context_method": "all_to_all"}),
    (leave_the_encoders_rows_in_the_order_of_ranks, "padded", {"context": 2}),
    (keep_a_ranks_gradient_of_gathered_keys, "without dropout", {"context": 2}),
]


def steps_with(fault: Callable[[], Any], tree: dict[str, Any]) -> Trajectory:
    with fault():
        return steps(tree, 2)


@pytest.mark.parametrize(
    ("fault", "option", "parallel"),
    [
        pytest.param(*each, id=each[0].__name__, marks=() if number < 2 else pytest.mark.slow)
        for number, each in enumerate(FAULTS)
    ],
)
def test_a_mistake_with_two_stacks_is_caught(fault, option, parallel, tmp_path):
    tree = settings(tmp_path, **OPTIONS[option])
    want = of_one_process(tree)
    assert any(differences(found, want) for found in ranks(2, steps_with, fault, {**tree, "parallel": parallel}))


def train_here(tree: dict[str, Any], world_size: int) -> None:
    with patch("megalith.training.setup.task_of", PredictSpans):
        run_here(tree, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline 2, cut in the encoder", "pipeline 2, a V", "context 2"])
def test_a_checkpoint_of_one_layout_goes_on_in_another(layout, tmp_path):
    tree = settings(tmp_path, **OPTIONS["padded"])
    _, parallel = LAYOUTS[layout]
    two, four = ({**tree, "train": {**tree["train"], "steps": steps}} for steps in (2, 4))
    ranks(1, train_here, {**four, "run": str(tmp_path / "alone")}, 1)
    want = losses(tmp_path / "alone")
    for first, then in (({}, parallel), (parallel, {})):
        folder = tmp_path / f"of {len(first)}"
        for each, here in ((two, first), (four, then)):
            size = 2 if here else 1
            ranks(size, train_here, {**each, "run": str(folder), "parallel": here}, size)
        assert losses(folder) == pytest.approx(want, rel=LAYOUT_FLOAT64, abs=0)
