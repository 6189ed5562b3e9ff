"""The cos and sin tables of rotary positions, computed once for all layers and applied by ``fusions.fused_rope``.

    angle(s, i) = s * base^(-2i / R), scaled, for pair i of the R rotated features

Su et al. 2021, "RoFormer", arXiv:2104.09864; scalings are those of ``fusions.rope_frequencies`` and related functions.
Multimodal rope assigns each pair to one of three position streams: time, height or width (Qwen2-VL, arXiv:2409.12191).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config import RopeConfig
from megalith.fusions import (
    llama3_rope_frequencies,
    rope_cos_sin,
    rope_frequencies,
    yarn_concentration,
    yarn_rope_frequencies,
)

__all__ = ["RotaryTable", "RotaryTables", "rotary_tables"]


class RotaryTable(NamedTuple):
    """cos and sin, each [S, R/2], or [S, B, R/2] if rows have different positions; in float32 or wider."""

    cos: Tensor
    sin: Tensor


class RotaryTables(NamedTuple):
    """The tables for layers that see the whole row and for layers with a window; often the same."""

    whole: RotaryTable
    local: RotaryTable

    def of(self, window: int | None) -> RotaryTable:
        """Returns the table for a layer with this window."""
        return self.whole if window is None else self.local


def rotary_tables(positions: Tensor, head_size: int, rope: RopeConfig, dtype: torch.dtype) -> RotaryTables:
    """Computes the tables for int64 ``positions`` in float32 or wider.

    Args:
        positions: [S], the same for all rows, or [B, S]; with ``rope.sections`` also [3, B, S]: time, height, width.
    """
    R, wide = rope.rotary_dim(head_size), torch.promote_types(dtype, torch.float32)
    whole = _table(positions, *_scaled_frequencies(rope, R, wide, positions.device), rope.sections)
    if rope.local_base is None:
        return RotaryTables(whole, whole)
    frequencies = rope_frequencies(R, rope.local_base, dtype=wide, device=positions.device)
    return RotaryTables(whole, _table(positions, frequencies, 1.0, rope.sections))


def _table(
    positions: Tensor, frequencies: Tensor, concentration: float, sections: tuple[int, int, int] | None
) -> RotaryTable:
    if positions.dim() < 3:
        return RotaryTable(*rope_cos_sin(positions.t(), frequencies, concentration))
    assert sections is not None, "the model rejects 3-D position_ids without sections"
    of_streams = [
        rope_cos_sin(stream.t(), its_pairs, concentration)  # [S, B, pairs of the stream] each
        for stream, its_pairs in zip(positions, frequencies.split(list(sections)), strict=True)
    ]
    cos, sin = (torch.cat(tables, dim=-1) for tables in zip(*of_streams, strict=True))  # [S, B, R/2]
    return RotaryTable(cos, sin)


def _scaled_frequencies(rope: RopeConfig, R: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """Returns the radians per token of each pair, [R/2], and the factor on cos and sin."""
    scaling = rope.scaling
    if scaling is None:
        return rope_frequencies(R, rope.base, dtype=dtype, device=device), 1.0
    if scaling.type == "linear":
        return rope_frequencies(R, rope.base, interpolation=scaling.factor, dtype=dtype, device=device), 1.0
    length = scaling.original_max_position_embeddings
    assert length is not None, "validated together with the type"
    if scaling.type == "llama3":
        frequencies = llama3_rope_frequencies(
            rope_frequencies(R, rope.base, dtype=dtype, device=device),
            scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=length,
        )
        return frequencies, 1.0
    frequencies = yarn_rope_frequencies(
        R,
        rope.base,
        scaling.factor,
        length,
        scaling.beta_fast,
        scaling.beta_slow,
        correction_range_round_to_int=scaling.truncate,
        dtype=dtype,
        device=device,
    )
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    return frequencies, yarn_concentration(scaling.factor, scaling.mscale, scaling.mscale_all_dim)
