"""Tables and positions for multi-latent attention, in the forms that Megatron uses."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_one_device, check_shape
from megalith.fusions.rope.rotation import Tables, tables
from megalith.fusions.rope.tables import positions_from_cu_seqlens

__all__ = ["Positions", "check_heads", "mla_tables"]


class Positions(NamedTuple):
    """The positions of tokens, or the document boundaries and context-parallel rank that determine them."""

    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cp_rank: int = 0
    cp_size: int = 1


def check_heads(name: str, x: Tensor, columns: Mapping[str, int], emb_dim: int) -> None:
    """Raises ShapeError unless heads have the named columns and ``emb_dim`` is even and positive."""
    if emb_dim % 2 or min(emb_dim, *columns.values()) <= 0:
        given = ", ".join(f"{key}={value}" for key, value in ({"emb_dim": emb_dim} | dict(columns)).items())
        raise ShapeError(f"sizes must be positive, and emb_dim even because features rotate in pairs; got {given}")
    D = sum(columns.values())
    if x.dim() not in (3, 4) or x.shape[-1] != D:
        wanted = " + ".join(columns)
        raise ShapeError(f"{name} must be [S, B, A, {D}] or [T, A, {D}], with {wanted} columns; got {list(x.shape)}")


def mla_tables(
    x: Tensor, cos: Tensor, sin: Tensor, emb_dim: int, positions: Positions, rotary_interleaved: bool
) -> Tables:
    """The tables for ``x`` [S, B, A, ...] or [T, A, ...]; arguments as in ``fused_apply_mla_rope_for_q``.

    Raises ShapeError if tensors do not fit, ConfigError if positions are unknown or given twice.
    """
    position_ids, cu_seqlens, cp_rank, cp_size = positions
    check_one_device(**{"the heads": x, "cos": cos, "sin": sin, "position_ids": position_ids, "cu_seqlens": cu_seqlens})
    if cu_seqlens is None and (cp_rank, cp_size) != (0, 1):
        raise ConfigError(
            "cp_rank and cp_size have no effect without cu_seqlens; pass cu_seqlens, or the position_ids of this rank"
        )
    if cu_seqlens is not None and (position_ids is not None or x.dim() == 4):
        raise ConfigError(
            "cu_seqlens is for packed tokens [T, A, ...] without position_ids; pass one of the two, and position_ids "
            "for [S, B, A, ...]"
        )
    if cu_seqlens is None and position_ids is None and x.dim() == 3:
        raise ConfigError("packed tokens [T, A, ...] need positions; pass cu_seqlens or position_ids")
    if cu_seqlens is not None:
        position_ids = positions_from_cu_seqlens(cu_seqlens, len(x), cp_rank, cp_size)
    cos, sin = (_half(table, emb_dim, rotary_interleaved) for table in (cos, sin))
    return tables(cos, sin, position_ids, x.shape[0], x.shape[1] if x.dim() == 4 else 1, emb_dim)


def _half(table: Tensor, emb_dim: int, rotary_interleaved: bool) -> Tensor:
    """[rows, R/2] from a table [rows, 1, 1, R] that holds each angle twice; other tables unchanged."""
    if table.dim() != 4:
        return table
    check_shape("cos and sin", table, (len(table), 1, 1, emb_dim), "[rows, 1, 1, emb_dim], or else [rows, emb_dim/2]")
    rows = table[:, 0, 0]
    first_half, even = rows[:, : emb_dim // 2], rows[:, ::2]
    unread = table.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(table, FakeTensor)
    in_halves = not unread and torch.equal(first_half, rows[:, emb_dim // 2 :])
    if not rotary_interleaved:
        if unread or in_halves:
            return first_half
        raise ConfigError(
            f"without rotary_interleaved a table [rows, 1, 1, {emb_dim}] must repeat each angle in both halves; this "
            f"one does not; pass [rows, {emb_dim // 2}], one column per pair, or rotary_interleaved=True for adjacent "
            "pairs"
        )
    # here Megatron's RotaryEmbedding repeats angles in adjacent columns, its YarnRotaryEmbedding in both halves
    if unread:
        raise ConfigError(
            f"with rotary_interleaved a table [rows, 1, 1, {emb_dim}] may repeat each angle in adjacent columns or in "
            f"both halves; reading its values to tell would synchronize with the device, or break torch.compile; pass "
            f"[rows, {emb_dim // 2}]: cos[:, 0, 0, ::2] if in adjacent columns, or "
            f"cos[:, 0, 0, :{emb_dim // 2}] if in both halves, as for YaRN"
        )
    if torch.equal(even, rows[:, 1::2]):
        return even
    if in_halves:
        return first_half
    raise ConfigError(
        f"a table [rows, 1, 1, {emb_dim}] must hold each angle twice, in adjacent columns or in both halves; this one "
        f"does not; pass [rows, {emb_dim // 2}], one column per pair"
    )
