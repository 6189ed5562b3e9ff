"""Finds the setting that was probably meant: by its spelling, its group, or its name in other programs."""

from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType

from megalith.config.dotted import parent
from megalith.config.moved import MOVED
from megalith.config.settings_tree import FIELDS, GROUPS

__all__ = ["nearest_group", "nearest_setting"]

# names in Megatron-LM, Hugging Face, PyTorch and earlier versions
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {old.rpartition(".")[2]: new for old, new in MOVED.items()}
    | {
        "activation_func_clamp_value": "model.glu.clamp",
        "adam_eps": "optim.adamw.eps",
        "add_qkv_bias": "model.attention.qkv_bias",
        "attention_output_gate": "model.attention.output_gate",
        "apply_layernorm_1p": "model.residual.zero_centered_norm",
        "attn_dropout": "model.attention_dropout",
        "attn_logit_softcapping": "model.attention.logit_softcap",
        "batch_size": "train.global_batch_size",
        "clip_grad": "optim.clip_norm",
        "context_parallel": "parallel.context",
        "context_parallel_size": "parallel.context",
        "cp_comm_type": "parallel.context_method",
        "data_path": "data.train",
        "exit_duration_in_mins": "train.time_limit",
        "embd_pdrop": "model.residual.embedding_dropout",
        "embedding_multiplier": "model.multipliers.embedding",
        "eval_interval": "train.evaluation.every",
        "final_logit_softcapping": "model.multipliers.logit_softcap",
        "fp32_residual_connection": "model.residual.fp32",
        "glu_linear_offset": "model.glu.offset",
        "head_dim": "model.kv_channels",
        "intermediate_size": "model.ffn_hidden_size",
        "learning_rate": "optim.lr",
        "lr_decay_iters": "optim.decay_steps",
        "lr_decay_style": "optim.schedule",
        "max_grad_norm": "optim.clip_norm",
        "max_lr": "optim.lr",
        "max_steps": "train.steps",
        "mup_base_head_dim": "model.mup.base_kv_channels",
        "mup_base_hidden_size": "model.mup.base_hidden_size",
        "n_embd": "model.hidden_size",
        "n_head": "model.num_attention_heads",
        "n_layer": "model.num_layers",
        "norm_epsilon": "model.layernorm_epsilon",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_query_groups",
        "partial_rotary_factor": "model.rope.percent",
        "per_device_train_batch_size": "train.micro_batch_size",
        "pretrained_checkpoint": "load",
        "qk_head_dim": "model.mla.qk_nope_head_dim",
        "qk_layernorm": "model.attention.qk_norm",
        "qk_pos_emb_head_dim": "model.mla.qk_rope_head_dim",
        "recompute_granularity": "train.recompute",
        "residual_multiplier": "model.multipliers.residual",
        "rms_norm_eps": "model.layernorm_epsilon",
        "rope_theta": "model.rope.base",
        "rotary_interleaved": "model.rope.interleaved",
        "rotary_percent": "model.rope.percent",
        "save_interval": "checkpoint.every",
        "sequence_length": "data.seq_length",
        "sequence_parallel": "parallel.sequence",
        "sliding_window": "model.attention.window",
        "softmax_scale": "model.attention.scale",
        "softmax_type": "model.attention.softmax",
        "swiglu": "model.activation",
        "swiglu_limit": "model.glu.clamp",
        "tensor_model_parallel_size": "parallel.tensor",
        "tie_embeddings": "model.tie_word_embeddings",
        "cp": "parallel.context",
        "ep": "parallel.expert",
        "etp": "parallel.expert_tensor",
        "pp": "parallel.pipeline",
        "tp": "parallel.tensor",
        "train_iters": "train.steps",
    }
)


def nearest_setting(name: str) -> str | None:
    """Returns the dotted name of the setting probably meant by the unknown ``name``; None if none is similar."""
    group, _, leaf = name.rpartition(".")
    leaf = leaf.replace("-", "_").lower()
    if named_so := [known for known in FIELDS if _leaf(known) == leaf]:  # right name, wrong group
        return max(named_so, key=lambda known: SequenceMatcher(None, parent(known), group).ratio())
    if leaf in _ELSEWHERE:
        return _ELSEWHERE[leaf]
    in_group = {_leaf(known): known for known in FIELDS if parent(known) == group}
    if close := get_close_matches(leaf, in_group, 1):
        return in_group[close[0]]
    leaves = {_leaf(known): known for known in FIELDS}
    close = get_close_matches(leaf, leaves, 1, cutoff=0.7)
    return leaves[close[0]] if close else None


def nearest_group(name: str) -> str | None:
    """Returns the dotted name of the group probably meant by the unknown ``name``; None if none is similar."""
    siblings = {_leaf(known): known for known in GROUPS if parent(known) == parent(name)}
    for groups in (siblings, {_leaf(known): known for known in GROUPS}):
        if close := get_close_matches(_leaf(name), groups, 1):
            return groups[close[0]]
    return None


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
