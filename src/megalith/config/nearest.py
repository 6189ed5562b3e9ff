"""The setting that somebody meant: by its spelling, by its place, or by its name in other programs."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from megalith.config.settings_tree import FIELDS, GROUPS

__all__ = ["nearest_setting"]

# names of Megatron-LM, Hugging Face and PyTorch
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "adam_eps": "optim.eps",
        "attn_dropout": "model.attention_dropout",
        "batch_size": "train.global_batch_size",
        "clip_grad": "optim.clip_norm",
        "data_path": "data.train",
        "exit_duration_in_mins": "train.time_limit",
        "eval_interval": "train.eval_every",
        "head_dim": "model.kv_channels",
        "intermediate_size": "model.ffn_hidden_size",
        "learning_rate": "optim.lr",
        "lr_decay_iters": "optim.decay_steps",
        "lr_decay_style": "optim.schedule",
        "max_grad_norm": "optim.clip_norm",
        "max_lr": "optim.lr",
        "max_steps": "train.steps",
        "n_embd": "model.hidden_size",
        "n_head": "model.num_attention_heads",
        "n_layer": "model.num_layers",
        "norm_epsilon": "model.layernorm_epsilon",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_query_groups",
        "per_device_train_batch_size": "train.micro_batch_size",
        "pretrained_checkpoint": "load",
        "rms_norm_eps": "model.layernorm_epsilon",
        "rope_theta": "model.rotary_base",
        "save_interval": "checkpoint.every",
        "sequence_length": "data.seq_length",
        "sequence_parallel": "parallel.sequence",
        "swiglu": "model.activation",
        "tensor_model_parallel_size": "parallel.tensor",
        "tie_embeddings": "model.tie_word_embeddings",
        "tp": "parallel.tensor",
        "train_iters": "train.steps",
    }
)


def nearest_setting(name: str) -> str | None:
    """The dotted name of a setting that ``name``, which is none, was probably meant to be."""
    group, dot, leaf = name.partition(".")
    leaf = (leaf if dot else group).replace("-", "_").lower()
    leaves = {known.rpartition(".")[2]: known for known in FIELDS}
    in_group = [known.removeprefix(f"{group}.") for known in FIELDS if known.startswith(f"{group}.")]
    if leaf in leaves:  # right name, other group
        near_groups = get_close_matches(group, GROUPS, 1)
        here = f"{near_groups[0]}.{leaf}" if near_groups else ""
        return here if here in FIELDS else leaves[leaf]
    if close := get_close_matches(leaf, in_group, 1):
        return f"{group}.{close[0]}"
    if leaf in _ELSEWHERE:
        return _ELSEWHERE[leaf]
    close = get_close_matches(leaf, leaves, 1, cutoff=0.7)
    return leaves[close[0]] if close else None
