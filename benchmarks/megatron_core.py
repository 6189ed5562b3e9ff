"""Megatron-Core's GPT and mixture of experts on a CPU, where it needs patches: it asks CUDA for the current device,
draws weights with a CUDA generator, and its experts look up a Transformer Engine GEMM under an undefined name.

Its GPT has the layers of its ``local`` specification, which needs neither Transformer Engine nor Apex.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.models.hf import parameter_shapes
from megalith.models.megatron.gpt import key_in_layer, source_of
from megalith.optional import need

__all__ = ["by_our_names", "load_by_our_names", "megatron_core_experts", "megatron_core_gpt"]

_SILU = torch.nn.functional.silu
# checkpoints name a layer's norms as Transformer Engine does, inside the linear layer that follows
_LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_OF_EXPERTS = re.compile(r"model\.layers\.(?P<layer>\d+)\.mlp\.(gate\.weight|experts\.(?P<weight>\w+))")
_LINEARS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}


def megatron_core_gpt(config: TransformerConfig, S: int, dtype: torch.dtype, *, fused: bool) -> Any:
    """Its ``GPTModel`` for a Llama or Mixtral of ``config`` and rows of ``S`` tokens, without dropout; the only rank.

    ``fused``: with those of its fusions that run on a CPU: SwiGLU, bias and dropout, cross entropy.
    """
    core, experts = _on_a_cpu(), {}
    num_experts = None if config.moe is None else config.moe.num_experts
    if config.moe is not None:
        experts = _expert_settings(config.ffn_hidden_size, config.moe.num_experts, config.moe.top_k)
    settings = core.transformer.TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        normalization="RMSNorm",
        layernorm_epsilon=config.layernorm_epsilon,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=_SILU,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        cross_entropy_loss_fusion=fused,
        **experts,
    )
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    layers = specs.get_gpt_layer_local_spec(num_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    model = import_module("megatron.core.models.gpt").GPTModel(
        settings,
        layers,
        config.vocab_size,
        S,
        position_embedding_type="rope",
        rotary_base=int(config.rope.base),
        share_embeddings_and_output_weights=False,
    )
    return model.to(dtype).train()  # norm weights too, as its Float16Module does


def by_our_names(config: TransformerConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of its GPT, by the names of its parameters, as tensors by the names of ours."""
    shapes = parameter_shapes(config)
    return {
        name: torch.cat([theirs[key][rows] for key, rows, _ in _parts(name, config)]).view(shape)
        for name, shape in shapes.items()
    }


@torch.no_grad()
def load_by_our_names(config: TransformerConfig, model: Any, weights: Mapping[str, Tensor]) -> None:
    """Loads ``weights``, by the names of our parameters, into its GPT."""
    theirs = dict(model.named_parameters())
    for name in parameter_shapes(config):
        for key, rows, own_rows in _parts(name, config):
            into = theirs[key][rows]
            into.copy_(weights[name][own_rows].view_as(into))


def megatron_core_experts(H: int, F: int, E: int, K: int, dtype: torch.dtype) -> Any:
    """Its ``MoELayer`` with ``SequentialMLP``: SwiGLU experts, weights over the chosen ones; the only rank."""
    core = _on_a_cpu()
    config = core.transformer.TransformerConfig(
        num_layers=1,
        hidden_size=H,
        ffn_hidden_size=F,
        num_attention_heads=1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=_SILU,
        bias_activation_fusion=True,
        use_cpu_initialization=True,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        **_expert_settings(F, E, K),
    )
    specs = import_module("megatron.core.models.gpt.moe_module_specs")
    spec = specs.get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
    layer = import_module("megatron.core.transformer.spec_utils").build_module(spec, config=config)
    layer.set_layer_number(1)
    return layer.train()


def _expert_settings(F: int | None, E: int, K: int) -> dict[str, Any]:
    return {
        "num_moe_experts": E,
        "moe_router_topk": K,
        "moe_ffn_hidden_size": F,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_router_dtype": "fp32",
    }


def _on_a_cpu() -> Any:
    """The package, patched, with its groups of the only rank."""
    core = need("megatron.core")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    core.parallel_state.initialize_model_parallel()
    import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    core.tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    return core


def _parts(name: str, config: TransformerConfig) -> Iterator[tuple[str, slice, slice]]:
    """The name of its parameter that holds ours, and the rows of each part in it and in ours."""
    if (found := _OF_EXPERTS.fullmatch(name)) is not None:
        assert config.moe is not None, "it has experts"
        of_layer, weight = int(found["layer"]), found["weight"]
        if weight is None:
            yield key_in_layer("mlp.router.weight", of_layer), slice(None), slice(None)
            return
        for expert in range(config.moe.num_experts):
            key = f"mlp.experts.local_experts.{expert}.{_LINEARS[weight]}.weight"
            yield key_in_layer(key, of_layer), slice(None), slice(expert, expert + 1)
        return
    key, layer, rows = source_of(name, config)
    if layer is not None:
        key = key_in_layer(_LOCAL_NORMS.get(key, key), layer)
    if not rows:
        yield key, slice(None), slice(None)
    for part in rows:
        yield key, slice(part.source, part.source + part.last - part.first), slice(part.first, part.last)
