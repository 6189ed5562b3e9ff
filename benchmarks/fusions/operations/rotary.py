"""Rotary position embedding."""

import torch
from torch import Tensor

from benchmarks.fusions import cost
from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions

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
    """As in Hugging Face's Llama: full tables in the dtype of q, halves swapped by concatenation."""
    cos, sin = (torch.cat((t, t), dim=-1).to(q.dtype)[:, None, None] for t in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(q), rotate(k)


def _liger() -> Call:
    from liger_kernel.ops.rope import LigerRopeFunction

    def compute(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat((t, t), dim=-1)[None].to(q.dtype) for t in (cos, sin))
        # it rotates [B, heads, S, D], in place
        q, k = (x.permute(1, 2, 0, 3).clone() for x in (q, k))
        y, y_k = LigerRopeFunction.apply(q, k, cos, sin)
        return y.permute(2, 0, 1, 3), y_k.permute(2, 0, 1, 3)

    return compute


_NOPE, _ROPE, _VALUE = 128, 64, 128  # head sizes of DeepSeek-V3: non-rotary, rotary, and value


def _mla_inputs(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    S = min(_S, max(1, num_bytes // (_A * (_NOPE + _VALUE) * dtype.itemsize)))
    B = max(1, num_bytes // (S * _A * (_NOPE + _VALUE) * dtype.itemsize))
    angles = torch.rand(S, _ROPE // 2, device=device)
    return {
        "kv": torch.randn(S, B, _A, _NOPE + _VALUE, device=device).to(dtype),
        "k_pos_emb": torch.randn(S, B, 1, _ROPE, device=device).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def _our_mla(
    kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    return fusions.fused_apply_mla_rope_for_kv(
        kv, k_pos_emb, cos, sin, emb_dim=_ROPE, k_dim=_NOPE, v_dim=_VALUE, backend=backend
    )


def _eager_mla(kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    nope, value = kv.split((_NOPE, _VALUE), dim=-1)
    cos, sin = (t.to(kv.dtype)[:, None, None] for t in (cos, sin))
    first, second = k_pos_emb[..., ::2], k_pos_emb[..., 1::2]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((nope, rotated.expand(*nope.shape[:-1], _ROPE)), dim=-1), value.contiguous()


OPERATIONS = [
    Operation(
        "MLA rope of keys and values",
        "mla_rope_kv",
        _mla_inputs,
        _our_mla,
        _eager_mla,
        cost.mla_rope_kv,
        constant=("cos", "sin"),
    ),
    Operation("rope", "rope", _inputs, fusions.fused_rope, _eager, cost.rope, {"Liger": _liger}, ("cos", "sin")),
]
