"""Hugging Face's MegatronBERT, one family for each head: an encoder with pre-norm layers and a final norm.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 5.3: with this order deep encoders train stably. The heads
and their names are those of BERT.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.bert import allowed_of_encoder, encoder_family, read_encoder, write_encoder
from megalith.models.hf.family import Family
from megalith.models.hf.fields import Fields

__all__ = [
    "MEGATRON_BERT_CLASSIFICATION",
    "MEGATRON_BERT_EMBEDDING",
    "MEGATRON_BERT_FAMILIES",
    "MEGATRON_BERT_MASKED_LM",
    "MEGATRON_BERT_MULTIPLE_CHOICE",
    "MEGATRON_BERT_PRETRAINING",
]

# our norms -> theirs
_NORMS = {"input_layernorm": "attention.ln", "post_attention_layernorm": "ln"}


def _read_rest(fields: Fields, head: Mapping[str, Any]) -> Mapping[str, Any]:
    if head["head"] != "embedding" and fields.optional("classifier_dropout", float) is not None:
        fields.refuse("classifier_dropout must be absent: the transformers classifiers use hidden_dropout_prob")
    return read_encoder(fields, head, norm_placement="pre")


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    written = write_encoder(config, max_position_embeddings)
    return {name: value for name, value in written.items() if name != "classifier_dropout"}


def _allowed(config: TransformerConfig, head: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_encoder(config, head, norm_placement="pre"),
        "bert.classifier_dropout": (None,),
    }


def _family(architecture: str, **head: Any) -> Family:
    read: Callable[[Fields], Mapping[str, Any]] = partial(_read_rest, head=head)
    return replace(
        encoder_family("megatron-bert", architecture, head, norms=_NORMS),
        read_rest=read,
        write_rest=_write_rest,
        allowed=partial(_allowed, head=head),
    )


MEGATRON_BERT_PRETRAINING = _family("MegatronBertForPreTraining", head="pretraining", binary_head=True)
MEGATRON_BERT_MASKED_LM = _family("MegatronBertForMaskedLM", head="pretraining", binary_head=False)
MEGATRON_BERT_CLASSIFICATION = _family("MegatronBertForSequenceClassification", head="classification")
MEGATRON_BERT_MULTIPLE_CHOICE = _family("MegatronBertForMultipleChoice", head="multiple_choice")
MEGATRON_BERT_EMBEDDING = _family("MegatronBertModel", head="embedding")
MEGATRON_BERT_FAMILIES = (
    MEGATRON_BERT_PRETRAINING,
    MEGATRON_BERT_MASKED_LM,
    MEGATRON_BERT_CLASSIFICATION,
    MEGATRON_BERT_MULTIPLE_CHOICE,
    MEGATRON_BERT_EMBEDDING,
)
