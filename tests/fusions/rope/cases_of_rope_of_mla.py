"""Cases of multi-latent attention's rotary embedding; a width stands for half of the rotated part."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_kv, fused_apply_mla_rope_for_q
from megalith.fusions.rope.mla_rope import FUSION
from megalith.fusions.rope.rope import FUSION as ROPE
from tests.fusions.harness import Case, Inputs

B, A, K, V = 2, 3, 6, 5  # head sizes that are not powers of two


def rotary_dim(width: int) -> int:
    """2, 14 and 128; and 64 for rotated widths that no model has."""
    return 2 * width if width < 65 else 64


def tables(num_rows: int, half: int, dtype: torch.dtype, device: str) -> Inputs:
    angles = torch.rand(num_rows, half, dtype=torch.float64, device=device) * 6.3
    table = torch.promote_types(dtype, torch.float32)
    return {"cos": angles.cos().to(table), "sin": angles.sin().to(table)}


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool = False) -> Tensor:
    """Rotates ``x`` [..., A, R] of tokens [S] or [S, B]: pairs 2i and 2i + 1, to i and i + R/2 or where they were."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    shape = (len(x), *([1] * (x.dim() - 2)), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., ::2], x[..., 1::2]
    y = (even * cos - odd * sin, odd * cos + even * sin)
    return torch.stack(y, dim=-1).flatten(-2) if interleaved else torch.cat(y, dim=-1)


def q_inputs(S: int, width: int, dtype: torch.dtype, device: str) -> Inputs:
    R = rotary_dim(width)
    return {"q": torch.randn(S, B, A, K + R, device=device).to(dtype), **tables(S, R // 2, dtype, device)}


def q_formula(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((q[..., :K], rotated(q[..., K:], cos, sin, None)), dim=-1)


def q_compute(q: Tensor, cos: Tensor, sin: Tensor, backend: Any) -> Tensor:
    return fused_apply_mla_rope_for_q(q, cos, sin, K, q.shape[-1] - K, backend=backend)


def kv_inputs(packed: bool, S: int, width: int, dtype: torch.dtype, device: str) -> Inputs:
    R = rotary_dim(width)
    tokens = (S,) if packed else (S, B)
    made: Inputs = {
        "kv": torch.randn(*tokens, A, K + V, device=device).to(dtype),
        "k_pos_emb": torch.randn(*tokens, 1, R, device=device).to(dtype),
    }
    if packed:
        return made | tables(9, R // 2, dtype, device) | {"positions": torch.randint(0, 9, tokens, device=device)}
    return made | tables(S, R // 2, dtype, device)


def kv_formula(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    pe = rotated(k_pos_emb, cos, sin, positions, rotary_interleaved)
    return torch.cat((kv[..., :K], pe.repeat_interleave(A, dim=-2)), dim=-1), kv[..., K:]


def kv_compute(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_interleaved: bool = False,
    backend: Any = None,
) -> tuple[Tensor, Tensor]:
    options = {"rotary_interleaved": rotary_interleaved, "position_ids": positions, "backend": backend}
    return fused_apply_mla_rope_for_kv(kv, k_pos_emb, cos, sin, k_pos_emb.shape[-1], K, V, **options)


def kv_case(name: str, packed: bool, **settings: Any) -> Case:
    return Case(
        name,
        FUSION,
        partial(kv_inputs, packed),
        partial(kv_compute, **settings),
        partial(kv_formula, **settings),
        terms=lambda **_: {"dk_pos_emb": 2 * A},
        cancels=("0", "dk_pos_emb"),  # sums of terms of either sign
        cost=cost.mla_rope_kv,
        constant=("cos", "sin"),
        shared=("cos", "sin", "positions"),
        widths=(1, 7, 64, 1536),
    )


CASES = [
    kv_case("mla rope of kv", False),
    kv_case("mla rope of packed kv, interleaved", True, rotary_interleaved=True),
    Case(
        "mla rope of q",
        ROPE,
        q_inputs,
        q_compute,
        q_formula,
        cancels=("0", "dq"),
        cost=cost.rope,
        constant=("cos", "sin"),
        shared=("cos", "sin"),
        widths=(1, 7, 64, 1536),
    ),
]
