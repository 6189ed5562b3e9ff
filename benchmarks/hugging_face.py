"""Hugging Face's models of a configuration of ours, with our weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.models.hf import LLAMA, MIXTRAL
from megalith.optional import need

__all__ = ["causal_lm", "load_by_name"]


def causal_lm(
    config: TransformerConfig, S: int, dtype: torch.dtype, *, experts: str = "eager", module: Any = None
) -> Any:
    """Its Llama, or its Mixtral with an implementation of ``experts``, for rows of ``S`` tokens, in training mode.

    ``module`` has the classes; None: transformers.
    """
    family, name = (LLAMA, "Llama") if config.moe is None else (MIXTRAL, "Mixtral")
    module = need("transformers") if module is None else module
    dtype_name = str(dtype).removeprefix("torch.")
    fields = family.config_to_hf(config, max_position_embeddings=S, dtype=dtype_name, eos_token_id=None)
    theirs = getattr(module, f"{name}Config")(**fields)
    if config.moe is not None:
        theirs._experts_implementation = experts
    return getattr(module, f"{name}ForCausalLM")(theirs).to(dtype).train()


def load_by_name(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads ``weights``; ours have the two matrices of an expert's gated unit in a dimension of their own."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict({name: weight.view(shapes[name]) for name, weight in weights.items()})
