"""Hugging Face's ``MistralForCausalLM``: a Llama without biases, whose layers have a sliding window.

Jiang et al. 2023, "Mistral 7B", arXiv:2310.06825.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.fields import Fields
from megalith.models.hf.llama import LLAMA, allowed_of_llamas, read_llamas, write_llamas
from megalith.models.hf.parameters import left_open

__all__ = ["MISTRAL"]

_GROUPS, _WINDOW = 8, 4096  # defaults of MistralConfig; null means no groups and no window


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    return {
        **read_llamas(fields),
        "num_query_groups": fields.get_or_null("num_key_value_heads", _GROUPS),
        "attention": {"window": fields.get_or_null("sliding_window", _WINDOW)},
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {
        **write_llamas(config, max_position_embeddings),
        "num_key_value_heads": config.num_query_groups,
        "sliding_window": config.attention.window,
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_llamas(config),
        **left_open(config, "attention.window"),
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "qkv_bias": (False,),
        "output_bias": (False,),
    }


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields={theirs: field for theirs, field in LLAMA.fields.items() if theirs != "num_key_value_heads"},
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
)
