"""The tables of rotary positions, made once for all layers; ``fusions.fused_rope`` turns queries and keys by them.

    angle(s, i) = s * base^(-2i / D), features i and i + D/2 are a pair

Su et al. 2021, "RoFormer", arXiv:2104.09864, in the half-split form of Hugging Face's Llama.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megalith.fusions import rope_cos_sin, rope_frequencies

__all__ = ["RotaryTable", "rotary_table"]


class RotaryTable(NamedTuple):
    """cos and sin, each [S, D/2], or [S, B, D/2] for rows with positions of their own; in float32 or wider."""

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, head_size: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """The table for int64 ``positions``: [S], the same for all rows, or [B, S]. Computed in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = rope_frequencies(head_size, base, dtype=wide, device=positions.device)
    return RotaryTable(*rope_cos_sin(positions.t(), frequencies))
