"""Megatron-Core's mixture of experts on a CPU, where it needs three patches: it asks CUDA for the current device, draws
weights with a CUDA generator, and looks up a Transformer Engine GEMM under a name it did not define."""

import contextlib
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from megalith.optional import need

__all__ = ["megatron_core_experts"]


def megatron_core_experts(H: int, F: int, E: int, K: int, dtype: torch.dtype) -> Any:
    """Its ``MoELayer`` with ``SequentialMLP``: SwiGLU experts, weights over the chosen ones; the only rank."""
    core = need("megatron.core")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    core.parallel_state.initialize_model_parallel()
    import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    core.tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    config = import_module("megatron.core.transformer").TransformerConfig(
        num_layers=1,
        hidden_size=H,
        ffn_hidden_size=F,
        num_attention_heads=1,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_ffn_hidden_size=F,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_router_dtype="fp32",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        use_cpu_initialization=True,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
    )
    specs = import_module("megatron.core.models.gpt.moe_module_specs")
    spec = specs.get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
    layer = import_module("megatron.core.transformer.spec_utils").build_module(spec, config=config)
    layer.set_layer_number(1)
    return layer.train()
