"""cos and sin tables of rotary embeddings, computed once for all layers; and the positions of packed tokens.

    frequency_i = base^(-2i / R), scaled;   cos, sin [rows, R/2] of position * frequency_i, times the concentration

Su et al. 2021, "RoFormer", arXiv:2104.09864. Scalings: Chen et al. 2023, "Position Interpolation", arXiv:2306.15595;
Llama 3.1, arXiv:2407.21783; Peng et al. 2023, "YaRN", arXiv:2309.00071.

R rotated features (rotary_dim), T tokens, N documents. Tables are half as wide as the rotated features, because both
features of a pair share an angle. They are float32: bfloat16 tables would have a relative error of 2^-9.
"""

import math

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError

__all__ = [
    "llama3_rope_frequencies",
    "positions_from_cu_seqlens",
    "rope_cos_sin",
    "rope_frequencies",
    "yarn_concentration",
    "yarn_cos_sin",
    "yarn_rope_frequencies",
]


def rope_frequencies(
    rotary_dim: int,
    base: float = 10000.0,
    *,
    interpolation: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Radians per token for each pair, [R/2].

    Positions are divided by ``interpolation``: 4 maps 8,192 tokens to the range of 2,048.

    Raises:
        ConfigError: an R that is not even and positive, or a base or interpolation that is not positive.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ConfigError(f"rotary_dim must be even and positive, as features are rotated in pairs; got {rotary_dim}")
    _check_positive(base=base, interpolation=interpolation)
    exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=dtype) / rotary_dim
    return 1.0 / (interpolation * base**exponents)


def llama3_rope_frequencies(
    frequencies: Tensor,
    factor: float = 8.0,
    *,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> Tensor:
    """``frequencies`` [R/2] scaled as in Llama 3.1: low ones divided by ``factor``, high ones kept, a ramp between.

    A frequency is low if it makes fewer than ``low_freq_factor`` rotations over the original context, and high if it
    makes more than ``high_freq_factor``.

    Raises:
        ConfigError: a factor that is not positive, or ``high_freq_factor`` not above ``low_freq_factor``.
    """
    _check_positive(factor=factor, low_freq_factor=low_freq_factor)
    if not high_freq_factor > low_freq_factor:
        raise ConfigError(
            f"high_freq_factor must be above low_freq_factor ({low_freq_factor}), because the ramp is between them; "
            f"got {high_freq_factor}"
        )
    rotations = frequencies * (original_max_position_embeddings / (2.0 * math.pi))
    kept = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / factor * (1.0 - kept)


def yarn_rope_frequencies(
    rotary_dim: int,
    base: float = 10000.0,
    scaling_factor: float = 1.0,
    original_max_position_embeddings: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    *,
    correction_range_round_to_int: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """YaRN's radians per token for each pair, [R/2]: high frequencies are kept, low ones interpolated.

    Frequencies that make more than ``beta_fast`` rotations over the original context are kept, those with fewer than
    ``beta_slow`` interpolated. Between them is a linear ramp over the index of the pair, whose ends are rounded to
    integers unless ``correction_range_round_to_int`` is False (as in gpt-oss).

    Raises:
        ConfigError: an R that is not even, or a number that is not positive.
    """
    _check_positive(scaling_factor=scaling_factor, beta_fast=beta_fast, beta_slow=beta_slow)
    kept = rope_frequencies(rotary_dim, base, dtype=dtype, device=device)
    stretched = kept / scaling_factor

    def pair_of_rotations(times: float) -> float:
        length = original_max_position_embeddings / (times * 2.0 * math.pi)
        return rotary_dim * math.log(length) / (2.0 * math.log(base))

    low, high = pair_of_rotations(beta_fast), pair_of_rotations(beta_slow)
    if correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = max(high - low, 0.001)  # a step if there is no pair between them
    ramp = ((torch.arange(len(kept), dtype=dtype, device=device) - low) / width).clamp(0.0, 1.0)
    return stretched * ramp + kept * (1.0 - ramp)


def yarn_concentration(
    scaling_factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's factor for cos and sin, which keeps attention over a longer context equally sharp.

    0.1 m ln(scaling_factor) + 1 with m = 1; if both are given, the ratio of the values for m = ``mscale`` and m =
    ``mscale_all_dim``, as in DeepSeek-V2 (arXiv:2405.04434).
    """

    def concentration(m: float) -> float:
        return 0.1 * m * math.log(scaling_factor) + 1.0 if scaling_factor > 1.0 else 1.0

    if mscale and mscale_all_dim:
        return concentration(mscale) / concentration(mscale_all_dim)
    return concentration(1.0)


def rope_cos_sin(positions: Tensor | int, frequencies: Tensor, concentration: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin, [..., R/2] in the dtype of ``frequencies`` [R/2], for integer ``positions`` [...].

    An int N stands for positions 0 to N - 1, the rows of a table to be indexed by positions later.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions, device=frequencies.device)
    angles = positions.unsqueeze(-1).to(frequencies.dtype) * frequencies
    return angles.cos() * concentration, angles.sin() * concentration


def yarn_cos_sin(
    positions: Tensor | int,
    rotary_dim: int,
    base: float = 10000.0,
    scaling_factor: float = 1.0,
    original_max_position_embeddings: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    *,
    correction_range_round_to_int: bool = True,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """YaRN's cos and sin, [..., R/2] in float32, scaled by the concentration; arguments as in the functions above."""
    frequencies = yarn_rope_frequencies(
        rotary_dim,
        base,
        scaling_factor,
        original_max_position_embeddings,
        beta_fast,
        beta_slow,
        correction_range_round_to_int=correction_range_round_to_int,
        device=positions.device if isinstance(positions, Tensor) else device,
    )
    return rope_cos_sin(positions, frequencies, yarn_concentration(scaling_factor, mscale, mscale_all_dim))


def positions_from_cu_seqlens(cu_seqlens: Tensor, T: int, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    """The position of each packed token in its document, int32 [T]; 0 for padding after the last document.

    Plain torch: a few operations on T integers, once per batch, for all layers.
    Under context parallelism each document is split into 2 * cp_size equal chunks, and rank r holds chunks r and 2 *
    cp_size - 1 - r of each, one after the other: a zigzag that balances the work.

    Args:
        cu_seqlens: int32 or int64 [N+1], the boundaries of whole documents, starting with 0; under context parallelism,
            of padded documents. Checked on the CPU only, because reading it from a GPU would wait for the GPU.
        T: tokens on this rank.
        cp_rank, cp_size: rank in, and size of, the context-parallel group.

    Raises:
        ShapeError: no documents, or, on the CPU, one whose length 2 * cp_size does not divide, or more tokens than T.
        ConfigError: a rank outside the group.
    """
    if not 0 <= cp_rank < cp_size:
        raise ConfigError(f"cp_rank must be at least 0 and below cp_size ({cp_size}); got {cp_rank}")
    _check_borders(cu_seqlens, T, cp_size)
    borders = cu_seqlens.long() // cp_size
    token = torch.arange(T, device=cu_seqlens.device)
    document = (torch.searchsorted(borders, token, right=True) - 1).clamp(max=len(borders) - 2)
    offset = token - borders[document]
    if cp_size > 1:
        chunk = (borders[document + 1] - borders[document]) // 2
        in_second = offset >= chunk
        offset += chunk * torch.where(in_second, 2 * cp_size - 2 - cp_rank, cp_rank)
    return torch.where(token < borders[-1], offset, 0).int()


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise ConfigError(f"{name} must be positive; got {value}")


def _check_borders(cu_seqlens: Tensor, T: int, cp_size: int) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            "cu_seqlens must be int32 or int64 [N+1], the boundaries of at least one document; "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > T * cp_size:
        raise ShapeError(
            f"cu_seqlens must be non-decreasing, from 0 to at most {T * cp_size} tokens; got {cu_seqlens.tolist()}"
        )
    if cp_size > 1 and (lengths % (2 * cp_size)).any():
        raise ShapeError(
            f"each document must be padded to a multiple of 2 * cp_size = {2 * cp_size} tokens, for equal chunks; "
            f"got lengths {lengths.tolist()}"
        )
