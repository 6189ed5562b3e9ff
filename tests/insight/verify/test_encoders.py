"""Proofs of encoders, alone and with decoders: their data are made small, and seeded faults are found."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from megalith.config import read_tree
from megalith.config.settings_tree import applied
from megalith.insight.verify.cover import AXES
from megalith.insight.verify.proof import Case
from megalith.models.contrastive import gather_passages
from megalith.training.tasks import train_embedding
from tests.insight.verify.proofs import Fault, begin, found_with
from tests.training import test_t5_layouts as t5
from tests.training.test_bert_layouts import (
    BERT,
    average_a_ranks_part_of_a_text,
    count_positions_from_each_ranks_first_token,
    draw_masks_by_the_rank,
    let_tokens_attend_to_padding,
    sum_the_gradients_of_a_head_that_is_whole_on_every_rank,
    take_a_ranks_part_of_token_types_for_the_whole,
)
from tests.training.test_faults import keep_the_gradients_of_tied_embeddings_apart

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
MEANS = {
    **CLASSIFICATION,
    "model": {**PRETRAINING["model"], "bert": {**CLASSES, "classifier_pooling": "mean"}},
}
EMBEDDING = {
    **CLASSIFICATION,
    "model": {**PRETRAINING["model"], "bert": {"num_token_types": 2, "head": "embedding", "embedding_size": 64}},
}
SPANS = {**PRETRAINING, "model": {**t5.T5, "num_attention_heads": 8, "num_query_groups": 8, "num_layers": 4}}
# the only weight that stages share is the position-bias table of a stack that is split across stages
UNTIED = {**SPANS, "model": {**SPANS["model"], "tie_word_embeddings": False, "multipliers": {}}}
SEQUENCE = {"tensor": 2, "sequence": True}


def compare_with_the_passages_of_this_rank_alone() -> Any:
    return patch.object(train_embedding, "gather_passages", lambda *given: gather_passages(*given[:3], None))


def keep_apart_the_embeddings_of_context_ranks() -> Any:
    return patch.object(train_embedding, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


# settings, the layout, and a fault that is found in it
PROOFS: dict[str, tuple[dict[str, Any], dict[str, Any], Fault]] = {
    "pretraining, padding": (PRETRAINING, {"shard": 2}, let_tokens_attend_to_padding),
    "pretraining, masks": (PRETRAINING, SEQUENCE, draw_masks_by_the_rank),
    "pretraining, token types": (PRETRAINING, SEQUENCE, take_a_ranks_part_of_token_types_for_the_whole),
    "pretraining, positions": (PRETRAINING, {"context": 2}, count_positions_from_each_ranks_first_token),
    "pretraining, tied embedding": (PRETRAINING, {"pipeline": 2}, keep_the_gradients_of_tied_embeddings_apart),
    "pretraining, head": (PRETRAINING, SEQUENCE, sum_the_gradients_of_a_head_that_is_whole_on_every_rank),
    "classification, positions": (CLASSIFICATION, {"context": 2}, count_positions_from_each_ranks_first_token),
    "classification, means": (MEANS, {"context": 2}, average_a_ranks_part_of_a_text),
    "classification, masks": (CLASSIFICATION, SEQUENCE, draw_masks_by_the_rank),
    "embedding, passages": (EMBEDDING, {"shard": 2}, compare_with_the_passages_of_this_rank_alone),
    "embedding, texts": (EMBEDDING, {"context": 2}, keep_apart_the_embeddings_of_context_ranks),
    "embedding, masks": (EMBEDDING, SEQUENCE, draw_masks_by_the_rank),
    "T5, tables": (UNTIED, {"pipeline": 2, "stage_layers": [2, 5]}, t5.forget_to_sum_the_tables_of_stages),
    "T5, padding": (SPANS, {"shard": 2}, t5.let_the_decoder_attend_to_padding),
    "T5, masks": (SPANS, SEQUENCE, t5.draw_masks_by_the_rank),
    "T5, inner features": (SPANS, {"tensor": 2}, t5.count_inner_features_from_each_ranks_first),
    "T5, distances": (SPANS, {"context": 2}, t5.take_distances_within_a_block),
    "T5, gathered keys": (SPANS, {"context": 2}, t5.keep_a_ranks_gradient_of_gathered_keys),
}
# with an encoder and a decoder whose rows cp splits, and samples that are compared; test_bert_layouts.py has the faults
# of a single stack
FAST = {"T5, gathered keys", "embedding, passages"}


LEARNED = {
    "model.position_embedding_type": "learned_absolute",
    "model.rope": None,
    "model.max_position_embeddings": 192,
}


@pytest.mark.parametrize("positions", [{}, LEARNED], ids=["rope", "learned"])
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_an_embedding_model_is_as_exact_in_float32_as_is_allowed(pooling, positions, tmp_path):
    changes = {**positions, "model.bert.embedding_pooling": pooling, "parallel.shard": 1}
    prepared = begin(applied(read_tree("embedding-tiny"), changes), 1, tmp_path)
    result = prepared.run(Case({}, "float32", "reference"))
    assert result.same, result


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROOFS]
)
def test_an_encoder_is_proven_and_its_mistake_is_found(name, tmp_path):
    settings, layout, fault = PROOFS[name]
    degrees = {axis: size for axis, size in layout.items() if axis in AXES}
    world_size = 2
    prepared = begin({**settings, "parallel": {"shard": 1, **layout}}, world_size, tmp_path)
    stacks = ("encoder.", "decoder.") if "t5" in settings["model"] else ("",)
    assert {f"the output of model.{stack}layers.0" for stack in stacks} <= {key.name for key in prepared.keys}
    case = Case(degrees, "float64", "reference")
    assert found_with(ExitStack, prepared, case)[0].same
    wrong, _ = found_with(fault, prepared, case)
    assert not wrong.same
    assert wrong.failure is None
