"""Hugging Face's RoFormer, one family for each head.

``RoFormerForMaskedLM``, ``RoFormerForSequenceClassification``, and for embeddings ``RoFormerModel``, which has no head.

It is BERT with rotary positions, in interleaved pairs (2i, 2i + 1), in place of learned ones (Su et al. 2021,
"RoFormer", arXiv:2104.09864). Their model stores sin and cos as a constant tensor; it has no binary head, and its
classifier's pooler uses the activation of the layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.fusions import rope_cos_sin, rope_frequencies
from megalith.models.hf.bert import BERT_HEADS, allowed_of_encoder, encoder_family, read_encoder, write_encoder
from megalith.models.hf.family import Family
from megalith.models.hf.fields import Fields

__all__ = ["ROFORMER_CLASSIFICATION", "ROFORMER_EMBEDDING", "ROFORMER_FAMILIES", "ROFORMER_MASKED_LM"]

_HEADS = {**BERT_HEADS, "pooler.dense": "classifier.dense", "classifier.linear": "classifier.out_proj"}
_PREFIX, _TABLE = "roformer.", "encoder.embed_positions.weight"


def _read_rest(fields: Fields, head: Mapping[str, Any]) -> Mapping[str, Any]:
    fields.expect("rotary_value", False)
    width = fields["hidden_size"]
    if (given := fields.get("embedding_size", width)) != width:
        fields.refuse(f"embedding_size must equal hidden_size ({width}) or be absent; got {given}")
    if head["head"] != "embedding" and fields.optional("classifier_dropout", float) is not None:
        fields.refuse("classifier_dropout must be absent: the transformers classifier uses hidden_dropout_prob")
    settings = read_encoder(fields, head)
    if head["head"] == "classification":
        settings["bert"]["classifier_activation"] = settings["activation"]
    return {
        **settings,
        "position_embedding_type": "rope",
        "max_position_embeddings": None,
        "rope": {"interleaved": True},
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    written = write_encoder(config, max_position_embeddings)
    written.pop("classifier_dropout", None)
    return {**written, "embedding_size": config.hidden_size, "rotary_value": False}


def _allowed(config: TransformerConfig, head: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_encoder(config, head),
        "position_embedding_type": ("rope",),
        "rope.interleaved": (True,),
        "bert.classifier_dropout": (None,),
        **({"bert.classifier_activation": (config.activation,)} if head["head"] == "classification" else {}),
    }


def _without_binary_head(config: TransformerConfig) -> TransformerConfig:
    """Returns the config without a binary head; token logits are the same."""
    if config.bert is None or config.bert.head != "pretraining":
        return config
    return config.model_copy(update={"bert": config.bert.model_copy(update={"binary_head": False})})


def _sin_cos(config: TransformerConfig, positions: Tensor) -> Tensor:
    """Returns the sin of all pairs, then the cos of all pairs, [P, D] in float64."""
    cos, sin = rope_cos_sin(positions, rope_frequencies(config.kv_channels, dtype=torch.float64))
    return torch.cat((sin, cos), dim=-1)


def _family(architecture: str, **head: Any) -> Family:
    read: Callable[[Fields], Mapping[str, Any]] = partial(_read_rest, head=head)
    family = encoder_family("roformer", architecture, head, heads=_HEADS, prefix=_PREFIX)
    return replace(
        family,
        read_rest=read,
        write_rest=_write_rest,
        allowed=partial(_allowed, head=head),
        written=_without_binary_head,
        tables=MappingProxyType({f"{family.prefix}{_TABLE}": _sin_cos}),
    )


ROFORMER_MASKED_LM = _family("RoFormerForMaskedLM", head="pretraining", binary_head=False)
ROFORMER_CLASSIFICATION = _family("RoFormerForSequenceClassification", head="classification")
ROFORMER_EMBEDDING = _family("RoFormerModel", head="embedding")
ROFORMER_FAMILIES = (ROFORMER_MASKED_LM, ROFORMER_CLASSIFICATION, ROFORMER_EMBEDDING)
