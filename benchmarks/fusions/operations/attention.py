"""Scale, mask and softmax; attention."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fusions import cost
from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions

__all__ = ["OPERATIONS"]

_A, _G, _D = 16, 4, 64


def _scores(num_bytes: int, dtype: torch.dtype, device: str, *, mask: bool) -> Inputs:
    S = min(2048, int((num_bytes / (_A * dtype.itemsize)) ** 0.5))
    B = max(1, num_bytes // (_A * S * S * dtype.itemsize))
    made: Inputs = {"scores": torch.randn(B, _A, S, S, device=device).to(dtype)}
    if mask:
        made["mask"] = torch.rand(B, 1, S, S, device=device) < 0.1
    return made


def _eager_softmax(scores: Tensor, mask: Tensor | None = None, *, causal: bool) -> Tensor:
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    wide = scores.float() * 0.125
    return torch.softmax(wide if mask is None else wide.masked_fill(mask, float("-inf")), dim=-1).to(scores.dtype)


def _heads(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    S = 1024
    B = max(1, num_bytes // (S * _A * _D * dtype.itemsize))
    return {
        name: torch.randn(S, B, heads, _D, device=device).to(dtype) for name, heads in (("q", _A), ("k", _G), ("v", _G))
    }


def _ours(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    return fusions.fused_attention(q, k, v, backend=backend)[0]


def _eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3)


def _megatron_causal() -> Call:
    from megatron.core.fusions.fused_softmax import ScaledUpperTriangMaskedSoftmax

    return lambda scores: ScaledUpperTriangMaskedSoftmax.apply(scores.flatten(0, 1), 0.125).view(scores.shape)


OPERATIONS = [
    Operation(
        "scale + causal + softmax",
        "masked_softmax",
        partial(_scores, mask=False),
        partial(fusions.masked_softmax, causal=True, scale=0.125),
        partial(_eager_softmax, causal=True),
        partial(cost.masked_softmax, causal=True, scale=0.125),
        {"Megatron": _megatron_causal},
    ),
    Operation(
        "scale + mask + softmax",
        "masked_softmax",
        partial(_scores, mask=True),
        partial(fusions.masked_softmax, scale=0.125),
        partial(_eager_softmax, causal=False),
        partial(cost.masked_softmax, scale=0.125),
    ),
    Operation("causal attention", "attention", _heads, _ours, _eager_attention),
]
