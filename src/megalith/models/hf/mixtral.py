"""Hugging Face's ``MixtralForCausalLM``: a Mistral with experts in every layer, weighted by softmax over the chosen.

Jiang et al. 2024, "Mixtral of Experts", arXiv:2401.04088.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.experts import allowed_of_experts
from megalith.models.hf.fields import Fields
from megalith.models.hf.llama import read_llamas
from megalith.models.hf.mistral import MISTRAL
from megalith.models.hf.places import Place

__all__ = ["MIXTRAL"]

_LINEARS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    if fields.get("router_jitter_noise", 0.0) != 0.0:
        fields.refuse(
            "router_jitter_noise must be 0: in training it perturbs the experts' input too, while "
            "model.moe.router.jitter perturbs only the router's"
        )
    return {
        **read_llamas(fields, rope_base=1e6),
        "num_query_groups": fields.get_or_null("num_key_value_heads", 8),
        "attention": {"window": fields.optional("sliding_window", int)},
        "moe": {"num_experts": fields.get("num_local_experts", 8), "top_k": fields.get("num_experts_per_tok", 2)},
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.moe is not None, "Mixtral has experts"
    return {
        **MISTRAL.write_rest(config, max_position_embeddings),
        "intermediate_size": config.expert_ffn_hidden_size,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {**MISTRAL.allowed(config), **allowed_of_experts(config)}


def _place(name: str) -> Place:
    layer, of_mlp, rest = name.partition(".mlp.")
    if not of_mlp:
        return Place(name)
    *outer, linear, kind = rest.split(".")
    return Place(".".join((layer, "block_sparse_moe", *outer, _LINEARS.get(linear, linear), kind)))


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields={**MISTRAL.fields, "rms_norm_eps": ("layernorm_epsilon", 1e-5)},
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
    place=_place,
)
