"""The training step of a Mixtral with 8 experts on the CPU: ours compared with Hugging Face's and Megatron-Core's.

A token goes to two experts, without a balance loss, so that an MLP computes as much as that of the Llama of case
``step``. All contenders together need 20 GiB of memory.
"""

import functools

import torch

from benchmarks.case import Case
from benchmarks.step import Size, contender, flops, megatron_core, ours, ours_as_trained, prepare, theirs
from megalith.config import TransformerConfig

__all__ = ["CASE"]

BF16 = torch.bfloat16
# for the worst tensor; bfloat16 sends tokens near a tie to other experts, and gradients of gates are off by 0.15 to 0.4
_contender = functools.partial(contender, tolerances={"float32": 1e-4, "bfloat16": 0.5})


def _size(L: int, H: int, A: int, F: int, E: int, V: int, S: int, B: int) -> Size:
    model = {
        "num_layers": L,
        "hidden_size": H,
        "num_attention_heads": A,
        "ffn_hidden_size": F,
        "vocab_size": V,
        "layernorm_epsilon": 1e-6,
        "moe": {"num_experts": E, "top_k": 2},
    }
    return Size(TransformerConfig.model_validate(model), S, B)


CASE = Case(
    title="CPU training step, Mixtral shape, 8 experts",
    base="Hugging Face, bfloat16, grouped_mm",
    contenders={
        "Megalith, float32": _contender(ours, "float32", dtype=torch.float32),
        "Megalith, bfloat16": _contender(ours, "bfloat16", dtype=BF16),
        "Megalith, bfloat16 over float32 (as trained)": _contender(ours_as_trained, "bfloat16", compiled=False),
        "Hugging Face, float32, eager": _contender(theirs, "float32", dtype=torch.float32, experts="eager"),
        "Hugging Face, float32, grouped_mm": _contender(theirs, "float32", dtype=torch.float32, experts="grouped_mm"),
        "Hugging Face, bfloat16, eager": _contender(theirs, "bfloat16", dtype=BF16, experts="eager"),
        "Hugging Face, bfloat16, grouped_mm": _contender(theirs, "bfloat16", dtype=BF16, experts="grouped_mm"),
        "Megatron-Core, float32": _contender(megatron_core, "float32", dtype=torch.float32, fused=False),
        "Megatron-Core, bfloat16": _contender(megatron_core, "bfloat16", dtype=BF16, fused=False),
        "Megatron-Core, bfloat16, its fusions": _contender(megatron_core, "bfloat16", dtype=BF16, fused=True),
    },
    sizes={
        "full": _size(L=4, H=512, A=8, F=704, E=8, V=8192, S=512, B=4),
        "quick": _size(L=2, H=64, A=4, F=64, E=4, V=256, S=64, B=2),
    },
    prepare=prepare,
    tokens=lambda size: size.B * size.S,
    flops=flops,
)
