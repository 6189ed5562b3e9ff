"""Implements the formulas stated in ``masked_softmax``, on rows of scores.

B micro-batch, A heads, Sq queries, Sk keys, T = B A Sq rows.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import functools
import math
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.blocks import blocks
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import as_rows, fresh_like, in_shape, wide

__all__ = [
    "OPERATOR",
    "BackSettings",
    "Rows",
    "Settings",
    "blocked",
    "gradients",
    "limits",
    "outputs",
    "reference",
    "reference_back",
    "sink_gradient",
    "softmax_back",
    "tile",
]

_INF = math.inf
_LOG2_E = 1.0 / math.log(2.0)
_ELEMENTS = 2048  # elements per program of the kernels, for short rows
_LARGEST_BLOCK = 16384  # untuned: 32 values of each tensor in the registers of a thread


def limits(causal: bool, window: tuple[int, int] | None, num_queries: int, num_keys: int) -> tuple[int, int]:
    """Number of keys visible before and after a query's position; -1 for all, also if a limit exceeds the sequence."""
    left, right = window or (-1, -1)
    right = 0 if causal else right
    return -1 if left >= num_keys - 1 else left, -1 if right >= num_queries - 1 else right


def tile(num_keys: int) -> tuple[int, int]:
    """Rows and columns that a program of the kernels holds at a time; wider rows are processed in several steps."""
    columns = max(16, 1 << (num_keys - 1).bit_length())
    return (1, 4096) if columns > _LARGEST_BLOCK else (max(1, _ELEMENTS // columns), columns)


class Rows(NamedTuple):
    """Rows of scores [B, A, Sq, Sk], numbered in memory order, and the window of their queries."""

    num_heads: int
    num_queries: int
    num_keys: int
    left: int
    right: int

    def hidden(self, block: slice, keys: slice, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Which of ``keys`` are hidden from the queries of a block: bool [rows, keys], or None if none are."""
        if mask is None and self.left < 0 and self.right < 0:
            return None
        rows, key = (torch.arange(of.start, of.stop, device=device) for of in (block, keys))
        query = rows % self.num_queries
        own = (query + (self.num_keys - self.num_queries))[:, None]  # the last query is aligned with the last key
        hidden = []
        if mask is not None:
            batch = rows // (self.num_queries * self.num_heads)
            of_keys = mask if mask.shape[3] == 1 else mask[..., keys]
            hidden.append(
                of_keys[batch % mask.shape[0], self.heads(block, device) % mask.shape[1], query % mask.shape[2]]
            )
        if self.left >= 0:
            hidden.append(key < own - self.left)
        if self.right >= 0:
            hidden.append(key > own + self.right)
        return functools.reduce(torch.logical_or, hidden) if hidden else None

    def heads(self, block: slice, device: torch.device) -> Tensor:
        """The head of each row of a block."""
        return torch.arange(block.start, block.stop, device=device) // self.num_queries % self.num_heads

    def keys_of(self, block: slice) -> slice:
        """The range of keys covered by the windows of a block of rows; at least one key."""
        first, last = block.start % self.num_queries, (block.stop - 1) % self.num_queries
        if block.stop - block.start > last - first + 1:  # the block spans several heads
            first, last = 0, self.num_queries - 1
        ahead = self.num_keys - self.num_queries
        start = 0 if self.left < 0 else min(max(0, first + ahead - self.left), self.num_keys - 1)
        stop = self.num_keys if self.right < 0 else min(last + ahead + self.right + 1, self.num_keys)
        return slice(start, max(stop, start + 1))


class Settings(NamedTuple):
    """The options of a softmax, for any number of keys; the last operands of the operator."""

    num_heads: int
    num_queries: int
    left: int
    right: int
    scale: float

    def rows(self, num_keys: int) -> Rows:
        return Rows(self.num_heads, self.num_queries, num_keys, self.left, self.right)


class BackSettings(NamedTuple):
    """``Settings``, and the dtype of the sink, which backward does not get; the last operands of backward."""

    num_heads: int
    num_queries: int
    left: int
    right: int
    scale: float
    sink_dtype: torch.dtype | None

    @property
    def forward(self) -> Settings:
        return Settings(*self[:-1])


def reference(x: Tensor, mask: Tensor | None, sink: Tensor | None, *options: Unpack[Settings]) -> tuple[Tensor, Tensor]:
    """p [T, Sk] of ``x`` [T, Sk], and the share of the sink [T], empty without one.

    ``x`` may also be [..., Sk], and so is p then. ``mask`` is [1 | B, 1 | A, 1 | Sq, 1 | Sk], ``sink`` [A]; ``left``
    and ``right`` limit the window, or are -1.
    """
    shape, x = x.shape, as_rows(x)
    T, Sk = x.shape
    settings = Settings(*options)
    rows, numbered = slice(0, T), settings.rows(Sk)
    hidden = numbered.hidden(rows, slice(0, Sk), mask, x.device)
    of_rows = None if sink is None else sink[numbered.heads(rows, x.device), None]
    p, share = _softmax(x, hidden, of_rows, settings.scale)
    return in_shape(p, shape), share


def _softmax(x: Tensor, hidden: Tensor | None, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """p of ``x`` [T, Sk], with keys that are ``hidden`` excluded, and the share [T] of a ``sink`` [T, 1]."""
    s = x.to(wide(x.dtype)) * scale
    if hidden is not None:
        s = s.masked_fill_(hidden, -_INF)
    top = s.detach().amax(dim=-1, keepdim=True)
    o = None if sink is None else sink.to(s.dtype)
    top = top if o is None else torch.maximum(top, o.detach())
    top = top.masked_fill(top == -_INF, 0.0)  # -inf - -inf is NaN; -inf - 0 has the exponential 0
    e = _exp_(s.sub_(top))
    total, share = e.sum(dim=-1, keepdim=True), s.new_empty(0)
    if o is not None:
        of_sink = _exp_(o - top)
        total = total + of_sink
        share = (of_sink / total).squeeze(-1)
    return (e / total.masked_fill(total == 0.0, 1.0)).to(x.dtype), share


def _exp_(x: Tensor) -> Tensor:
    """exp in place; on a CPU torch's exp is 20 to 400 times slower when it underflows, as it does for hidden keys."""
    return x.mul_(_LOG2_E).exp2_()


def softmax_back(dp: Tensor, p: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Reference backward: dx [T, Sk] from ``dp`` and ``p`` [T, Sk], and r [T] in float32 or wider."""
    acc = wide(p.dtype)
    dp, wide_p = dp.to(acc), p.to(acc)
    r = (dp * wide_p).sum(dim=-1)
    return (dp - r[:, None]).mul_(wide_p).mul_(scale).to(p.dtype), r


def reference_back(dp: Tensor, p: Tensor, share: Tensor, *options: Unpack[BackSettings]) -> tuple[Tensor, Tensor]:
    """dx [T, Sk] and do [A], empty without a sink, from the results of ``reference``."""
    settings = BackSettings(*options)
    dx, r = softmax_back(dp, p, settings.scale)
    dtype = settings.sink_dtype
    return dx, dx.new_empty(0) if dtype is None else sink_gradient(r, share, settings.forward).to(dtype)


def sink_gradient(r: Tensor, share: Tensor, settings: Settings) -> Tensor:
    """do [A] from r and the sink's share, both [T]."""
    A, Sq = settings.num_heads, settings.num_queries
    return -(r * share).view(len(r) // max(1, A * Sq), A, Sq).sum(dim=(0, 2))


def outputs(
    x: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    *_: Unpack[Settings],
) -> tuple[Tensor, Tensor]:
    """Allocates p [T, Sk] and the sink's share [T], empty without a sink."""
    return fresh_like(x), x.new_empty(0 if sink is None else x.shape[0], dtype=wide(x.dtype))


def gradients(
    dp: Tensor,
    p: Tensor,
    share: Tensor,
    *options: Unpack[BackSettings],
) -> tuple[Tensor, Tensor]:
    """Allocates dx [T, Sk] and do [A], empty without a sink."""
    settings = BackSettings(*options)
    dtype, num_heads = settings.sink_dtype, settings.num_heads
    return fresh_like(p), p.new_empty(0 if dtype is None else num_heads, dtype=dtype or p.dtype)


def _saves(
    outputs: tuple[Tensor, ...], x: Tensor, mask: Tensor | None, sink: Tensor | None, *settings: Unpack[Settings]
) -> tuple[object, ...]:
    return *outputs, *settings, None if sink is None else sink.dtype


OPERATOR = Operator(outputs, gradients, of=("x", "sink"), saves=_saves, rows=("x", "dp", "p"))


def _forward(x: Tensor, mask: Tensor | None, sink: Tensor | None, *options: Unpack[Settings]) -> tuple[Tensor, Tensor]:
    p, share = outputs(x, mask, sink, *options)
    settings = Settings(*options)
    numbered = settings.rows(x.shape[1])
    for block in blocks(*x.shape):
        keys = numbered.keys_of(block)
        hidden = numbered.hidden(block, keys, mask, x.device)
        inside = _zero_outside(p[block], keys)
        if sink is None:
            _torch_softmax_into(inside, x[block, keys], hidden, settings.scale)
        else:
            o = sink[numbered.heads(block, x.device), None]
            probabilities, share[block] = _softmax(x[block, keys], hidden, o, settings.scale)
            inside.copy_(probabilities)
    return p, share


def _zero_outside(block: Tensor, keys: slice) -> Tensor:
    """Returns the ``keys`` of a block of rows, after setting the other columns to 0."""
    if keys.stop - keys.start < block.shape[1]:
        block[:, : keys.start], block[:, keys.stop :] = 0.0, 0.0
    return block[:, keys]


def _torch_softmax_into(p: Tensor, x: Tensor, hidden: Tensor | None, scale: float) -> None:
    """Fills ``p`` using torch's kernel, which computes in float32 and rounds once.

    16-bit scores are widened first unless scaling them is exact.
    """
    s = x if _shrinks_exactly(scale) else x.to(wide(x.dtype))
    s = s if scale == 1.0 else s * scale
    s = s if hidden is None else s.masked_fill(hidden, -_INF)
    if s.dtype == p.dtype and p.is_contiguous():
        torch.softmax(s, dim=-1, out=p)
    else:
        p.copy_(torch.softmax(s, dim=-1))
    if p[:, 0].isnan().any():  # torch returns NaN for a row that has NaN or inf, or that is hidden entirely
        p.masked_fill_(s.amax(dim=-1, keepdim=True) == -_INF, 0.0)


def _shrinks_exactly(scale: float) -> bool:
    return 0.0 < scale <= 1.0 and math.frexp(scale)[0] == 0.5  # a power of 2


def _backward(dp: Tensor, p: Tensor, share: Tensor, *options: Unpack[BackSettings]) -> tuple[Tensor, Tensor]:
    dx, dsink = gradients(dp, p, share, *options)
    settings = BackSettings(*options)
    numbered = settings.forward.rows(p.shape[1])
    r = p.new_empty(0 if settings.sink_dtype is None else p.shape[0], dtype=wide(p.dtype))
    for block in blocks(*p.shape):
        keys = numbered.keys_of(block)
        inside = _zero_outside(dx[block], keys)
        if settings.sink_dtype is None:
            _torch_softmax_back_into(inside, dp[block, keys], p[block, keys], settings.scale)
        else:
            of_scores, r[block] = softmax_back(dp[block, keys], p[block, keys], settings.scale)
            inside.copy_(of_scores)
    return dx, dsink if settings.sink_dtype is None else sink_gradient(r, share, settings.forward).to(
        settings.sink_dtype
    )


def _torch_softmax_back_into(dx: Tensor, dp: Tensor, p: Tensor, scale: float) -> None:
    back = torch.ops.aten._softmax_backward_data
    acc = p.dtype if _shrinks_exactly(scale) else wide(p.dtype)
    if acc == dx.dtype and dx.is_contiguous():  # the out variant ignores strides
        back.out(dp, p, -1, acc, grad_input=dx)
        dx.mul_(scale)
    else:
        dx.copy_(back(dp.to(acc), p.to(acc), -1, acc).mul_(scale))


blocked = OPERATOR.register("masked_softmax_blocked", _forward, _backward, opaque=True)
