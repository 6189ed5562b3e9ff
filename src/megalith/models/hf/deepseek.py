"""Hugging Face's ``DeepseekV3ForCausalLM`` and ``DeepseekV2ForCausalLM``: latent attention and experts.

The first layers have an MLP, the others routed and shared experts. V3 routes by sigmoid with a load-balancing bias, V2
by softmax over all experts.

V3's published files store multi-token prediction modules as additional layers, which transformers' class ignores.
config.json does not show whether files have them: transformers also writes ``num_nextn_predict_layers`` without any.

DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434; "DeepSeek-V3", arXiv:2412.19437.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megalith.config import MLAConfig, MoEConfig, TransformerConfig
from megalith.config.draft import round_up
from megalith.config.layer_pattern import shortest_pattern
from megalith.config.router_config import groups_limit_choices
from megalith.models.hf.experts import allowed_of_experts
from megalith.models.hf.fields import Fields
from megalith.models.hf.layer_types import MOST_LAYERS
from megalith.models.hf.llama import LLAMA, allowed_of_llamas, read_llamas, write_llamas
from megalith.models.hf.parameters import left_open, num_layers_in_all

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3"]

_EPSILON = 1e-6  # in the norms of latents, whatever rms_norm_eps is
# fields that do not affect the network: training losses, parallelism, and head sizes that follow from other fields
_UNUSED: Mapping[str, type] = MappingProxyType(
    {"aux_loss_alpha": float, "ep_size": int, "head_dim": int, "qk_head_dim": int, "seq_aux": bool}
)
_SIZES: Mapping[str, int] = MappingProxyType(
    {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
# expert fields, with the defaults of their classes; for fields that a class lacks, the only value that is supported
_EXPERTS_V3: Mapping[str, Any] = MappingProxyType(
    {
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
)
_EXPERTS_V2: Mapping[str, Any] = MappingProxyType(
    {
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "num_experts_per_tok": 0,  # null in the class, which cannot run without it
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "moe_layer_freq": 1,
    }
)
_IN_GROUPS = "group_limited_greedy"
_GROUPS = ("moe.router.num_groups", "moe.router.group_topk")


def _read_v3(fields: Fields) -> Mapping[str, Any]:
    given = {name: fields.get(name, default) for name, default in _EXPERTS_V3.items()}
    num_modules = _num_modules(fields)
    settings = _read_latents(fields, interleaved=fields.get("rope_interleave", True))
    moe = _read_experts(fields, given, num_modules)
    if moe is not None:
        _only(fields, given, "scoring_func", "topk_method", of=_EXPERTS_V3)
        # our router divides the weights of several experts by their sum, but leaves a single weight as it is
        if given["norm_topk_prob"] != (given["num_experts_per_tok"] > 1):
            fields.refuse(
                "norm_topk_prob must be true if num_experts_per_tok is above 1, and false if it is 1; got "
                f"{given['norm_topk_prob']} with {given['num_experts_per_tok']}"
            )
        # the bias stays constant unless a run sets an update rate
        moe["router"] |= {"score_function": "sigmoid", "expert_bias_update_rate": 0.0}
        if given["n_group"] > 1:
            moe["router"] |= _groups(given, group_score_topk=2)
    mtp = {"num_modules": num_modules} if num_modules else None
    return {**settings, "moe": moe, "mtp": mtp}


def _read_v2(fields: Fields) -> Mapping[str, Any]:
    given = {name: fields.get(name, default) for name, default in _EXPERTS_V2.items()}
    fields.expect("mlp_bias", False)
    moe = _read_experts(fields, given, num_modules=0)
    if moe is not None:
        _only(fields, given, "scoring_func", "norm_topk_prob", of=_EXPERTS_V2)
        moe["router"] |= {"pre_softmax": True}
        if given["topk_method"] == _IN_GROUPS:
            moe["router"] |= _groups(given, group_score_topk=1)
        elif given["topk_method"] != "greedy":
            fields.refuse(f"topk_method must be 'greedy' or {_IN_GROUPS!r}; got {given['topk_method']!r:.80}")
    return {**_read_latents(fields, interleaved=True), "moe": moe}


def _groups(given: Mapping[str, Any], *, group_score_topk: int) -> dict[str, int]:
    """Returns the settings of expert groups; empty if they limit no choice, which a run would reject."""
    num_groups, kept = given["n_group"], given["topk_group"]
    if 0 < kept <= num_groups and not groups_limit_choices(
        given["num_experts_per_tok"], num_groups, kept, group_score_topk
    ):
        return {}
    return {"num_groups": num_groups, "group_topk": kept, "group_score_topk": group_score_topk}


def _read_latents(fields: Fields, *, interleaved: bool) -> dict[str, Any]:
    for name, kind in _UNUSED.items():
        fields.optional(name, kind)
    heads = fields["num_attention_heads"]
    if (keys := fields.get("num_key_value_heads", heads)) != heads:
        fields.refuse(f"num_key_value_heads must equal num_attention_heads ({heads}); got {keys}")
    bias = fields.get("attention_bias", False)
    sizes = {name: fields.get(name, default) for name, default in _SIZES.items()}
    settings = read_llamas(fields)
    return {
        **settings,
        "rope": {**_with_mscale(settings["rope"], fields), "interleaved": interleaved},
        "attention": {"qkv_bias": bias, "output_bias": bias},
        "mla": {**sizes, "q_lora_rank": fields.get_or_null("q_lora_rank", 1536), "norm_epsilon": _EPSILON},
    }


def _with_mscale(rope: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Returns ``rope``; rejects an mscale_all_dim that was dropped from it but that their attention still applies."""
    given = [fields.optional(name, dict) or {} for name in ("rope_scaling", "rope_parameters")]
    if any(one.get("mscale_all_dim") for one in given) and "mscale_all_dim" not in (rope["scaling"] or {}):
        fields.refuse("mscale_all_dim of rope_scaling requires mscale, and cannot be combined with attention_factor")
    return rope


def _read_experts(fields: Fields, given: Mapping[str, Any], num_modules: int) -> dict[str, Any] | None:
    """Returns the settings of ``model.moe`` except for routing; None if all layers have an MLP."""
    first, num_layers = given["first_k_dense_replace"], fields["num_hidden_layers"] + num_modules
    if first < 0:
        fields.refuse(f"first_k_dense_replace must be 0 or more; got {first}")
    layers = tuple(index >= first for index in range(min(num_layers, MOST_LAYERS)))
    if not any(layers):
        return None
    _only(fields, given, "moe_layer_freq", of=_EXPERTS_V3)
    if (shared := given["n_shared_experts"]) < 1:
        fields.refuse(
            f"n_shared_experts must be 1 or more, because the transformers class always has a shared MLP; got {shared}"
        )
    return {
        "num_experts": given["n_routed_experts"],
        "top_k": given["num_experts_per_tok"],
        "ffn_hidden_size": given["moe_intermediate_size"],
        "shared_ffn_hidden_size": given["moe_intermediate_size"] * shared,
        "layers": shortest_pattern(layers),
        "router": {"scaling_factor": given["routed_scaling_factor"]},
    }


def _num_modules(fields: Fields) -> int:
    """Returns the number of multi-token prediction modules: that of config.json if the files hold any, else 0."""
    named = fields.get("num_nextn_predict_layers", 1)
    first = f"model.layers.{fields['num_hidden_layers']}."
    return named if any(key.startswith(first) for key in fields.keys) else 0


def _only(fields: Fields, given: Mapping[str, Any], *names: str, of: Mapping[str, Any]) -> None:
    for name in names:
        if given[name] != of[name]:
            fields.refuse(f"{name} must be {of[name]!r}, the only supported value; got {given[name]!r:.80}")


def _write_v3(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.rope is not None, "DeepSeek-V3 has rotary positions"
    return {
        **_write_latents(config, max_position_embeddings),
        **({} if config.moe is None else _write_experts(config, config.moe)),
        "norm_topk_prob": config.moe is None or config.moe.top_k > 1,
        "rope_interleave": config.rope.interleaved,
        "num_nextn_predict_layers": 0 if config.mtp is None else config.mtp.num_modules,
    }


def _write_v2(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    in_groups = config.moe is not None and config.moe.router.num_groups is not None
    return {
        **_write_latents(config, max_position_embeddings),
        **({} if config.moe is None else _write_experts(config, config.moe)),
        "topk_method": _IN_GROUPS if in_groups else "greedy",
        "norm_topk_prob": False,
        "mlp_bias": False,
    }


def _write_latents(config: TransformerConfig, max_position_embeddings: int) -> dict[str, Any]:
    assert config.mla is not None, "all DeepSeek models have MLA"
    return {
        **write_llamas(config, max_position_embeddings),
        **{name: getattr(config.mla, name) for name in (*_SIZES, "q_lora_rank")},
        "num_key_value_heads": config.num_attention_heads,
        "attention_bias": config.qkv_bias,
        "first_k_dense_replace": _num_dense(config),
    }


def _write_experts(config: TransformerConfig, moe: MoEConfig) -> dict[str, Any]:
    assert moe.shared_ffn_hidden_size is not None, "DeepSeek's MoE layers have shared experts"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": config.expert_ffn_hidden_size,
        "n_shared_experts": moe.shared_ffn_hidden_size // config.expert_ffn_hidden_size,
        "n_group": moe.router.num_groups or 1,
        "topk_group": moe.router.group_topk or 1,
        "routed_scaling_factor": moe.router.scaling_factor,
    }


def _num_dense(config: TransformerConfig) -> int:
    """Returns how many of the first layers have an MLP."""
    num_layers = num_layers_in_all(config)
    if config.moe is None:
        return num_layers
    return next((index for index in range(num_layers) if config.moe.has_experts(index)), num_layers)


def _allowed_v3(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    allowed = _allowed_of_latents(config) | left_open(config, "rope.interleaved")
    if config.mtp is not None:
        allowed |= left_open(config, "mtp.num_modules", "mtp.loss_weight")
    if config.moe is None:
        return allowed
    rate = config.moe.router.expert_bias_update_rate
    return {
        **allowed,
        **_allowed_of_experts(config, config.moe, group_score_topk=2),
        "moe.router.score_function": ("sigmoid",),
        "moe.router.expert_bias_update_rate": ("a number" if rate is None else rate,),
    }


def _allowed_v2(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    allowed = {
        **_allowed_of_latents(config),
        "rope.interleaved": (True,),
        # DeepseekV2Config requires a multiple of the number of heads, whatever the head size
        "hidden_size": (round_up(config.hidden_size, config.num_attention_heads),),
    }
    if config.moe is None:
        return allowed
    experts = _allowed_of_experts(config, config.moe, group_score_topk=1)
    return {**allowed, **experts, "moe.router.pre_softmax": (True,)}


def _allowed_of_latents(config: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    of_latents: dict[str, tuple[Any, ...]] = {"mla.kv_lora_rank": ("a positive integer",)}
    if config.mla is not None:
        of_latents = left_open(config, *(f"mla.{name}" for name in MLAConfig.model_fields))
        of_latents["mla.norm_epsilon"] = (_EPSILON, None) if config.layernorm_epsilon == _EPSILON else (_EPSILON,)
    return {
        **allowed_of_llamas(config),
        **of_latents,
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "output_bias": (config.qkv_bias,),
    }


def _allowed_of_experts(
    config: TransformerConfig, moe: MoEConfig, *, group_score_topk: int
) -> dict[str, tuple[Any, ...]]:
    """``group_score_topk``: how many experts of a group their class sums to score it."""
    num_dense, width = _num_dense(config), config.expert_ffn_hidden_size
    layers = tuple(index >= num_dense for index in range(num_layers_in_all(config)))
    begins_dense = all(moe.has_experts(index) == one for index, one in enumerate(layers))
    shared = round_up(moe.shared_ffn_hidden_size or width, width)
    scored: tuple[Any, ...] = (None,)
    if moe.router.group_topk is not None:
        usual = moe.top_k == group_score_topk * moe.router.group_topk
        scored = (group_score_topk, None) if usual else (group_score_topk,)
    return {
        **allowed_of_experts(config, "moe.router.scaling_factor", *_GROUPS),
        "moe.layers": (moe.layers if begins_dense else shortest_pattern(layers),),
        "moe.shared_ffn_hidden_size": (shared,),
        "moe.router.group_score_topk": scored,
    }


DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields={name: field for name, field in LLAMA.fields.items() if name not in ("num_key_value_heads", "head_dim")},
    read_rest=_read_v3,
    write_rest=_write_v3,
    allowed=_allowed_v3,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read_rest=_read_v2,
    write_rest=_write_v2,
    allowed=_allowed_v2,
)
