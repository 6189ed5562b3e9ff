"""An encoder learns in every layout what it learns in one process: padded and packed rows, float64, two steps.

One process is checked elsewhere: against single sentences in tests/models/test_bert_model.py, and against transformers
in tests/models/hf/test_bert.py.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.models import heads, language_model
from megalith.models.bert_model import BertModel
from megalith.parallel import parameters
from megalith.topology import collectives
from megalith.transformer import dropout, embeddings, normalization
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training.masked_task import PredictMasked
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences

BERT: dict[str, Any] = GPT2 | {
    "num_layers": 3,
    "activation": "gelu",
    "residual": {"norm_placement": "post"},
    "bert": {"num_token_types": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "post-norm, padded": {"model": BERT},
    "pre-norm, rope, packed": {
        "model": BERT | {"residual": {}, "position_embedding_type": "rope", "tie_word_embeddings": False},
        "data": {"reset_attention_mask": True, "reset_position_ids": True},
    },
    "post-norm, rope of neighbours, padded": {
        "model": BERT | {"position_embedding_type": "rope", "rope": {"interleaved": True}},
    },
    "a window both ways, positions after two rows": {
        "model": BERT | {"attention": {"window": 3}, "bert": {"num_token_types": 3, "position_offset": 2}},
        "train": {"fused_linear_cross_entropy": True},
    },
    "layers computed again": {"model": BERT, "train": {"recompute": "full"}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2, uneven": (2, {"pipeline": 2}),
    "context 2": (2, {"context": 2}),
    "context 2, all_gather": (2, {"context": 2, "context_method": "all_gather"}),
    "shard 2": (2, {"shard": 2}),
    "pipeline 3": (3, {"pipeline": 3, "stage_layers": [1, 1, 1]}),
    "tensor 2, sequence x pipeline 2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
    "context 2 x tensor 2, sequence": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "context 2 x pipeline 2": (4, {"context": 2, "pipeline": 2}),
    "shard 2 x tensor 2": (4, {"shard": 2, "tensor": 2}),
    "replicate 2 x context 2": (4, {"replicate": 2, "context": 2}),
}
# `make test` takes each axis once, two of them on four ranks; tests/training/tasks/test_pretrain_bert.py has the ring
FAST = {
    ("post-norm, padded", "tensor 2, sequence"),
    ("post-norm, padded", "pipeline 2, uneven"),
    ("pre-norm, rope, packed", "context 2, all_gather"),
    ("a window both ways, positions after two rows", "tensor 2"),
    ("layers computed again", "shard 2 x tensor 2"),
}
CASES = [
    pytest.param(option, layout, marks=() if (option, layout) in FAST else pytest.mark.slow)
    for option in OPTIONS
    for layout in LAYOUTS
]


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    return first_steps(tree, world_size, task=PredictMasked)


def of_one_process(tree: dict[str, Any]) -> Trajectory:
    """One process with whole batches and no recomputation."""
    train = {name: value for name, value in tree["train"].items() if not name.startswith("recompute")}
    alone = {**tree, "train": {**train, "micro_batch_size": train["global_batch_size"]}}
    alone.pop("parallel", None)
    [want] = ranks(1, steps, alone, 1)
    return want


@pytest.mark.parametrize(("option", "layout"), CASES)
def test_an_encoder_learns_the_same_in_every_layout(option, layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, **OPTIONS[option])
    want = of_one_process(tree)
    for rank, found in enumerate(ranks(num_ranks, steps, {**tree, "parallel": parallel}, num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"


def let_tokens_attend_to_padding() -> Any:
    return patch.object(BertModel, "_documents", lambda self, *given: None)


def draw_masks_by_the_rank() -> Any:
    keyed = dropout.sequence_parallel_key

    def own(key: Any, group: Any) -> Any:
        found = keyed(key, group)
        return found if group is None else type(found)(found.seed + group.rank(), found.step, found.tokens)

    return patch("megalith.models.language_model.sequence_parallel_key", own)


def sum_the_gradients_of_a_head_that_is_whole_on_every_rank() -> Any:
    gather = collectives.gather_from_sequence_parallel_region

    def summed(x: Any, group: Any, tensor_parallel_output_grad: bool = True) -> Any:
        return gather(x, group, True)

    return patch.object(language_model, "gather_from_sequence_parallel_region", summed)


def take_a_ranks_part_of_token_types_for_the_whole() -> Any:
    return patch.object(embeddings, "local", lambda weight, partial=False: parameters.local(weight))


def take_a_ranks_part_of_a_norm_for_the_whole() -> Any:
    return patch.object(normalization, "local", lambda weight, partial=False: parameters.local(weight))


def count_positions_from_each_ranks_first_token() -> Any:
    look_up = embeddings.LearnedPositions.forward

    def own(self: Any, positions: Any) -> Any:
        return look_up(self, torch.arange(positions.shape[-1]))

    return patch.object(embeddings.LearnedPositions, "forward", own)


def pool_the_first_token_of_every_rank() -> Any:
    forward = BertModel._of_texts

    def own(self: Any, x: Any, pooled_tokens: Any, context: Any) -> Any:
        return forward(self, x, pooled_tokens - pooled_tokens % x.shape[0], context)

    return patch.object(BertModel, "_of_texts", own)


def average_a_ranks_part_of_a_text() -> Any:
    return patch.object(heads, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


SEQUENCE = {"tensor": 2, "sequence": True}
FAULTS: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (let_tokens_attend_to_padding, "post-norm, padded", {"shard": 2}),
    (draw_masks_by_the_rank, "post-norm, padded", SEQUENCE),
    (sum_the_gradients_of_a_head_that_is_whole_on_every_rank, "post-norm, padded", SEQUENCE),
    (take_a_ranks_part_of_token_types_for_the_whole, "post-norm, padded", SEQUENCE),
    (take_a_ranks_part_of_a_norm_for_the_whole, "post-norm, padded", SEQUENCE),
    (count_positions_from_each_ranks_first_token, "post-norm, padded", {"context": 2}),
    (pool_the_first_token_of_every_rank, "pre-norm, rope, packed", {"context": 2}),
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
def test_a_mistake_with_an_encoder_is_caught(fault, option, parallel, tmp_path):
    tree = settings(tmp_path, **OPTIONS[option])
    want = of_one_process(tree)
    assert any(differences(found, want) for found in ranks(2, steps_with, fault, {**tree, "parallel": parallel}))
