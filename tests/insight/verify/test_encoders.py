"""Proofs of encoders: the data that their tasks read are made small too, and mistakes of theirs are found."""

from contextlib import ExitStack
from typing import Any

import pytest

from megalith.insight.verify.proof import Case
from tests.insight.verify.proofs import Fault, begin, found_with
from tests.training.test_bert_layouts import (
    BERT,
    count_positions_from_each_ranks_first_token,
    draw_masks_by_the_rank,
    let_tokens_attend_to_padding,
    take_a_ranks_part_of_token_types_for_the_whole,
)

PRETRAINING: dict[str, Any] = {
    "model": {**BERT, "num_attention_heads": 8, "num_layers": 4, "max_position_embeddings": 64},
    "data": {"train": "nowhere", "seq_length": 64, "masking": {"probability": 0.3}},
    "train": {"steps": 100, "global_batch_size": 64, "micro_batch_size": 2},
    "optim": {"lr": 1e-3, "clip_norm": 0.5},
    "run": "nowhere",
}
CLASSES = {"num_token_types": 2, "head": "classification", "num_classes": 12}
CLASSIFICATION = {
    **PRETRAINING,
    "model": {**PRETRAINING["model"], "bert": CLASSES},
    "data": {"train": "nowhere", "seq_length": 64},
}
SEQUENCE = {"tensor": 2, "sequence": True}
# settings, the layout, and a mistake that is found in it
PROOFS: dict[str, tuple[dict[str, Any], dict[str, Any], Fault]] = {
    "pretraining, padding": (PRETRAINING, {"shard": 2}, let_tokens_attend_to_padding),
    "pretraining, masks": (PRETRAINING, SEQUENCE, draw_masks_by_the_rank),
    "pretraining, token types": (PRETRAINING, SEQUENCE, take_a_ranks_part_of_token_types_for_the_whole),
    "pretraining, positions": (PRETRAINING, {"context": 2}, count_positions_from_each_ranks_first_token),
    "classification, positions": (CLASSIFICATION, {"context": 2}, count_positions_from_each_ranks_first_token),
    "classification, masks": (CLASSIFICATION, SEQUENCE, draw_masks_by_the_rank),
}
FAST = {"pretraining, token types", "classification, positions"}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROOFS]
)
def test_an_encoder_is_proven_and_its_mistake_is_found(name, tmp_path):
    settings, layout, fault = PROOFS[name]
    degrees = {axis: size for axis, size in layout.items() if axis != "sequence"}
    world_size = 2
    prepared = begin({**settings, "parallel": {"shard": 1, **layout}}, world_size, tmp_path)
    case = Case(degrees, "float64", "reference")
    assert found_with(ExitStack, prepared, case)[0].same
    wrong, _ = found_with(fault, prepared, case)
    assert not wrong.same
    assert wrong.failure is None
