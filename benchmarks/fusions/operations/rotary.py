"""Rotary positions."""

import torch
from torch import Tensor

from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions
from megalith.fusions import cost

__all__ = ["OPERATIONS"]

_A, _G, _D, _S = 32, 8, 128, 1024


def _inputs(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    S = min(_S, max(1, num_bytes // (_A * _D * dtype.itemsize)))
    B = max(1, num_bytes // (S * _A * _D * dtype.itemsize))
    angles = torch.rand(S, _D // 2, device=device)
    return {
        "q": torch.randn(S, B, _A, _D, device=device).to(dtype),
        "k": torch.randn(S, B, _G, _D, device=device).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As Hugging Face's Llama spells it: whole tables in the dtype of q, halves swapped by concatenation."""
    cos, sin = (torch.cat((t, t), dim=-1).to(q.dtype)[:, None, None] for t in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(q), rotate(k)


def _liger() -> Call:
    from liger_kernel.ops.rope import LigerRopeFunction

    def compute(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat((t, t), dim=-1)[None].to(q.dtype) for t in (cos, sin))
        # it turns [B, heads, S, D], in place
        q, k = (x.permute(1, 2, 0, 3).clone() for x in (q, k))
        y, y_k = LigerRopeFunction.apply(q, k, cos, sin)
        return y.permute(2, 0, 1, 3), y_k.permute(2, 0, 1, 3)

    return compute


OPERATIONS = [
    Operation("rope", "rope", _inputs, fusions.fused_rope, _eager, cost.rope, {"Liger": _liger}, ("cos", "sin")),
]
