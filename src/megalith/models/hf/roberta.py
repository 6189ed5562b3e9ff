"""Hugging Face's RoBERTa, one family for each head.

``RobertaForMaskedLM``, ``RobertaForSequenceClassification``, and for embeddings ``RobertaModel``, which has no head.

It is BERT with other names for the heads. Positions start after the row for padding: the position table has
pad_token_id + 1 rows before that of position 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.bert import allowed_of_encoder, encoder_family, read_encoder, write_encoder
from megalith.models.hf.family import Family
from megalith.models.hf.fields import Fields

__all__ = ["ROBERTA_CLASSIFICATION", "ROBERTA_EMBEDDING", "ROBERTA_FAMILIES", "ROBERTA_MASKED_LM"]

_USUAL_OFFSET = 2
_HEADS = {
    "lm_transform.dense": "lm_head.dense",
    "lm_transform.norm": "lm_head.layer_norm",
    "lm_head": "lm_head",
    # its classifier contains its own pooler
    "pooler.dense": "classifier.dense",
    "classifier.linear": "classifier.out_proj",
}


def _read_rest(fields: Fields, head: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = read_encoder(fields, head, position_offset=fields.get("pad_token_id", _USUAL_OFFSET - 1) + 1)
    if head["head"] == "pretraining" and settings["activation"] != "gelu":
        fields.refuse("hidden_act must be 'gelu': the transformers LM head always uses it, whatever the layers use")
    return settings


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {
        **write_encoder(config, max_position_embeddings),
        "pad_token_id": config.position_offset - 1,
    }


def _allowed(config: TransformerConfig, head: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_encoder(config, head),
        **({"activation": ("gelu",)} if head["head"] == "pretraining" else {}),
        "bert.position_offset": (config.position_offset or _USUAL_OFFSET,),
    }


def _family(architecture: str, **head: Any) -> Family:
    return replace(
        encoder_family("roberta", architecture, head, heads=_HEADS, prefix="roberta."),
        read_rest=partial(_read_rest, head=head),
        write_rest=_write_rest,
        allowed=partial(_allowed, head=head),
    )


ROBERTA_MASKED_LM = _family("RobertaForMaskedLM", head="pretraining", binary_head=False)
ROBERTA_CLASSIFICATION = _family("RobertaForSequenceClassification", head="classification")
ROBERTA_EMBEDDING = _family("RobertaModel", head="embedding")
ROBERTA_FAMILIES = (ROBERTA_MASKED_LM, ROBERTA_CLASSIFICATION, ROBERTA_EMBEDDING)
