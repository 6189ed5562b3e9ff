"""Rotary position embedding, in the half-split form of Hugging Face's Llama.

    y = x * cos + rotate_half(x) * sin,   rotate_half([a, b]) = [-b, a],   angle(s, i) = s * base^(-2i / D)

Su et al. 2021, "RoFormer", arXiv:2104.09864.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RotaryTable", "apply_rotary", "rotary_table"]


class RotaryTable(NamedTuple):
    """cos and sin, each [S, 1 or B, 1, D], in float32 or wider."""

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, head_size: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """The table for int64 ``positions``: [S], the same for all rows, or [B, S]. Computed in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=wide) / head_size
    rows = positions if positions.dim() == 2 else positions.unsqueeze(0)  # [1 or B, S]
    angles = rows.t().unsqueeze(-1).to(wide) / base**exponents  # [S, 1 or B, D/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)  # [S, 1 or B, 1, D]
    return RotaryTable(angles.cos(), angles.sin())


def apply_rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """``x`` [S, B, A, D] turned by its position; computed in the table's dtype, rounded once to that of ``x``."""
    wide = x.to(table.cos.dtype)  # once: a product of two dtypes would convert for every operation, slowly
    first, second = wide.chunk(2, dim=-1)
    return (wide * table.cos + torch.cat((-second, first), dim=-1) * table.sin).to(x.dtype)
