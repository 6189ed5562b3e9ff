"""Rotation of features by position in plain torch, shared by all rotary operations, and the tables it reads.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)    for each pair (x1, x2) of the R rotated features

The layout determines which features form a pair: ``neox`` i and i + R/2, ``interleaved`` 2i and 2i + 1; ``deepseek``
reads 2i and 2i + 1 and writes i and i + R/2. The inverse uses the same tables, and reads the layout that the forward
rotation writes; since the rotation is orthogonal, its inverse is also its gradient.

S sequence, B micro-batch, D head size, R rotated features (rotary_dim), P streams of positions: 1, or 3 for mRoPE.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_shape
from megalith.fusions.core.rows import wide

__all__ = [
    "Layout",
    "Rotation",
    "Tables",
    "check_layout",
    "columns",
    "normalize",
    "normalize_back",
    "pairs_written",
    "reads_pairs",
    "rotate",
    "rotate_pairs",
    "tables",
]

Layout = Literal["neox", "interleaved", "deepseek"]
_LAYOUTS = get_args(Layout)


class Rotation(NamedTuple):
    """All options of a rotation that are not tensors: the last arguments of every rotary operator."""

    layout: str
    inverse: bool = False
    offset: int = 0  # the first rotated column; 0, or D - R
    sections: Sequence[int] = ()  # number of pairs for each of three streams; empty for one stream
    eps: float = 0.0
    zero_centered: bool = False


class Tables(NamedTuple):
    """``cos`` and ``sin`` [rows, 1 or B, R/2]; token s uses row s, or those in ``positions`` [S, 1 or B, P]."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    def of_tokens(self, sections: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, [S, 1 or B, 1, R/2] in ``dtype``, which broadcast over the heads."""
        if self.positions is None:
            return self.cos.to(dtype).unsqueeze(2), self.sin.to(dtype).unsqueeze(2)
        cos, sin = (self._chosen(table, self.positions, sections) for table in (self.cos, self.sin))
        return cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)

    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that have one row per token."""
        return (self.cos, self.sin) if self.positions is None else (self.positions,)

    def block(self, *rows: Tensor) -> "Tables":
        """The tables for a block of tokens, given that block's slices of ``rows()``."""
        return Tables(rows[0], rows[1], None) if self.positions is None else Tables(self.cos, self.sin, rows[0])

    @staticmethod
    def _chosen(table: Tensor, positions: Tensor, sections: Sequence[int]) -> Tensor:
        rows = table.squeeze(1).index_select(0, positions.flatten())  # raises for a row out of range
        rows = rows.unflatten(0, positions.shape)  # [S, 1 or B, P, R/2]
        parts = rows.split(list(sections), dim=-1) if sections else (rows,)
        return torch.cat([part[..., stream, :] for stream, part in enumerate(parts)], dim=-1)  # [S, 1 or B, R/2]


def check_layout(layout: str) -> None:
    """Raises ConfigError for an unknown layout."""
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(_LAYOUTS)}; got {layout!r}")


def tables(
    cos: Tensor, sin: Tensor, positions: Tensor | None, S: int, B: int, rotary_dim: int, num_streams: int = 1
) -> Tables:
    """Checks and returns the tables for S x B tokens.

    Args:
        cos, sin: [rows, R/2], or [S, B, R/2] with a row for each token.
        positions: int32 or int64 [S] or [S, B], rows of [rows, R/2]; with a leading dimension P if ``num_streams`` > 1.

    Raises:
        ShapeError: tables of the wrong width or with fewer rows than tokens, or positions that do not fit.
        ConfigError: a table that requires a gradient.
    """
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        # only the reference would compute it
        raise ConfigError("cos and sin must not require grad, but one of them does; pass cos.detach(), sin.detach()")
    check_shape("sin", sin, cos.shape, "like cos")
    half = rotary_dim // 2
    if cos.dim() not in (2, 3) or cos.shape[-1] != half or (cos.dim() == 3 and tuple(cos.shape[:2]) != (S, B)):
        raise ShapeError(
            f"cos must be [rows, {half}] or [{S}, {B}, {half}], one column for each pair of the {rotary_dim} rotated "
            f"features; got {list(cos.shape)}"
        )
    cos, sin = (table.unsqueeze(1) if table.dim() == 2 else table for table in (cos, sin))
    if positions is None:
        if num_streams > 1:
            raise ShapeError(f"sections need {num_streams} positions per token; pass positions [3, {S}]")
        if len(cos) < S:
            raise ShapeError(f"cos must have a row for each of {S} tokens, unless positions are given; got {len(cos)}")
        return Tables(cos[:S], sin[:S], None)
    shapes = [[*streams, S, *batch] for streams in ([num_streams] if num_streams > 1 else [],) for batch in ([], [B])]
    if list(positions.shape) not in shapes or positions.dtype not in (torch.int32, torch.int64):
        wanted = " or ".join(map(str, shapes))
        raise ShapeError(
            f"positions must be int32 or int64 with shape {wanted}; got {positions.dtype} {list(positions.shape)}"
        )
    if cos.shape[1] != 1:
        raise ShapeError(
            f"positions need a table [rows, {half}] to index; got [{S}, {B}, {half}], which has a row per token already"
        )
    streams = positions.movedim(0, -1) if num_streams > 1 else positions.unsqueeze(-1)  # [S, P] or [S, B, P]
    return Tables(cos, sin, streams.unsqueeze(1) if streams.dim() == 2 else streams)


def reads_pairs(layout: str, inverse: bool) -> bool:
    """Whether pairs are adjacent in the input; with ``not inverse``, whether they are adjacent in the output."""
    return layout == "interleaved" or (layout == "deepseek" and not inverse)


def rotate(x: Tensor, table: Tables, how: Rotation, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` [S, B, A, D] rotated by its positions, in float32 or wider, or rounded to ``dtype``."""
    dtype = dtype or wide(x.dtype)
    others: list[Tensor] = []
    if 2 * table.cos.shape[-1] < x.shape[-1]:
        before, x, after = columns(x, table, how)
        others = [before.to(dtype), after.to(dtype)]
    # rounded before they are joined: the compiler would join them in float32, in memory
    halves = [half.to(dtype) for half in rotate_pairs(x, table, how)]
    pairs = reads_pairs(how.layout, not how.inverse)
    y = torch.stack(halves, dim=-1).flatten(-2) if pairs else torch.cat(halves, dim=-1)
    return torch.cat((others[0], y, others[1]), dim=-1) if others else y


def columns(x: Tensor, table: Tables, how: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the columns before the rotated ones, of the rotated ones, and of those after."""
    R = 2 * table.cos.shape[-1]
    before, both, after = x.split((how.offset, R, x.shape[-1] - how.offset - R), dim=-1)
    return before, both, after


def pairs_written(y: Tensor, how: Rotation) -> tuple[Tensor, Tensor]:
    """Views of the two parts of ``y`` [..., R] that the results of ``rotate_pairs`` are written to."""
    return _halves(y, reads_pairs(how.layout, not how.inverse))


def rotate_pairs(
    x: Tensor, table: Tables, how: Rotation, out: Sequence[Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Both rotated features of each pair of ``x`` [S, B, A, R]: two [S, B, A, R/2] in float32 or wider, or ``out``."""
    acc = wide(x.dtype)
    cos, sin = table.of_tokens(how.sections, acc)
    first, second = _halves(x.to(acc), reads_pairs(how.layout, how.inverse))
    if reads_pairs(how.layout, how.inverse):
        first, second = first.contiguous(), second.contiguous()  # a copy is cheaper than four strided products
    sign = -1.0 if how.inverse else 1.0
    return (
        torch.mul(first, cos, out=out[0]).addcmul_(second, sin, value=-sign),
        torch.mul(second, cos, out=out[1]).addcmul_(first, sin, value=sign),
    )


def normalize(x: Tensor, weight: Tensor, how: Rotation) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of ``x`` [..., D], and 1 / its root mean square [...]; both in float32 or wider."""
    x = x.to(wide(x.dtype))
    rstd = torch.rsqrt(x.square().mean(dim=-1) + how.eps)
    return x * rstd.unsqueeze(-1) * _gain(weight, x.dtype, how), rstd


def normalize_back(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, how: Rotation) -> tuple[Tensor, Tensor]:
    """Gradients of ``normalize`` for a wide ``dy`` [S, B, A, D]: of ``x`` in its dtype, of ``weight`` in dy's."""
    normed = x.to(dy.dtype) * rstd.unsqueeze(-1)
    dweight = (dy * normed).sum(dim=(0, 1, 2))
    dy = dy * _gain(weight, dy.dtype, how)
    dx = rstd.unsqueeze(-1) * (dy - normed * (dy * normed).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), dweight


def _halves(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Views of the two features of each pair."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(dim=-1) if pairs else x.chunk(2, dim=-1)
    return first, second


def _gain(weight: Tensor, dtype: torch.dtype, how: Rotation) -> Tensor:
    return weight.to(dtype) + 1.0 if how.zero_centered else weight.to(dtype)
