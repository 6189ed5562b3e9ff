"""Multi-token prediction modules as in transformers, stored as in DeepSeek's own files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.models.hf import peers

__all__ = ["of_modules", "write_with_modules"]


def write_with_modules(folder: Path, num_modules: int, **fields: Any) -> tuple[PreTrainedModel, MtpModel]:
    """Writes a folder with multi-token prediction modules, like DeepSeek's; returns transformers' model and modules."""
    theirs = peers.deepseek_v3(num_nextn_predict_layers=num_modules, **fields)
    modules = MtpModel(theirs, num_modules)
    with torch.no_grad():
        for name, tensor in modules.layers.state_dict().items():
            tensor.fill_(1.0 if "norm" in name else 0.0)  # allocated uninitialized
    peers.randomized(modules.layers)
    theirs.save_pretrained(folder)
    state = load_file(folder / "model.safetensors") | of_modules(theirs, modules.layers.state_dict())
    for layer in range(2, 2 + num_modules):
        state[f"model.layers.{layer}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"model.layers.{layer}.shared_head.head.weight"] = theirs.lm_head.weight.detach().clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return theirs, modules


def of_modules(theirs: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of the modules' layers, under the names in DeepSeek's files."""
    named = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".")
        rest = rest.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        named[f"model.layers.{theirs.config.num_hidden_layers + int(layer)}.{rest}"] = tensor
    return peers.as_in_files(theirs, named)
