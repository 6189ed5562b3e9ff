"""Implements the formulas stated in ``rope``; the rotation itself is in ``rotation``.

S sequence, B micro-batch, A heads, G kv groups, D head size, R rotated features.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from megalith.fusions.core.blocks import by_blocks, widened_by_blocks
from megalith.fusions.core.compiled_formulas import CompiledFormula
from megalith.fusions.core.registration import Operator, gradients_like
from megalith.fusions.core.rows import fresh_like, wide
from megalith.fusions.rope.rotation import (
    Rotation,
    Tables,
    columns,
    normalize,
    normalize_back,
    pairs_written,
    rotate,
    rotate_pairs,
)

__all__ = [
    "OPERATOR",
    "GivenToBackward",
    "Heads",
    "Operands",
    "Outputs",
    "blocked",
    "compiled",
    "gradients",
    "outputs",
    "reference",
]

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Operands(NamedTuple):
    """Operands of the operator; the last fields are those of ``Rotation``."""

    q: Tensor
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    layout: str
    inverse: bool
    offset: int
    sections: list[int]
    eps: float
    zero_centered: bool

    @property
    def table(self) -> Tables:
        return Tables(self.cos, self.sin, self.positions)

    @property
    def rotation(self) -> Rotation:
        return Rotation(*self[7:])


class Heads(NamedTuple):
    """What backward has for q, or for k; dy is empty if there is no k."""

    dy: Tensor
    x: Tensor | None
    weight: Tensor | None
    rstd: Tensor


class GivenToBackward(NamedTuple):
    """Gradients, and what was saved; the last fields are those of ``Rotation``."""

    dy: Tensor
    dy_k: Tensor
    q: Tensor | None
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    q_rstd: Tensor
    k_rstd: Tensor
    layout: str
    inverse: bool
    offset: int
    sections: list[int]
    eps: float
    zero_centered: bool

    def parts(self) -> tuple[Heads, Heads, Tables, Rotation]:
        """Splits the operands into those for q, those for k, the tables, and the inverse rotation."""
        of_q = Heads(self.dy, self.q, self.q_norm_weight, self.q_rstd)
        of_k = Heads(self.dy_k, self.k, self.k_norm_weight, self.k_rstd)
        back = Rotation(*self[11:])._replace(inverse=not self.inverse)
        return of_q, of_k, Tables(self.cos, self.sin, self.positions), back


def reference(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    *options: Unpack[Rotation],
) -> Outputs:
    """q and k, rotated, and 1 / root mean square of their heads, [S, B, A] and [S, B, G]; empty if not applicable.

    Takes q [S, B, A, D], k [S, B, G, D], the fields of ``Tables``, gains [D], and the fields of ``Rotation``.
    """
    table, how = Tables(cos, sin, positions), Rotation(*options)

    def of(x: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if x is None:
            return q.new_empty(0), q.new_empty(0)
        if weight is None:
            return rotate(x, table, how, x.dtype), q.new_empty(0)
        normed, rstd = normalize(x, weight, how)
        return rotate(normed, table, how, x.dtype), rstd

    (y, rstd), (y_k, k_rstd) = of(q, q_norm_weight), of(k, k_norm_weight)
    return y, y_k, rstd, k_rstd


def outputs(*operands: Unpack[Operands]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates what ``reference`` returns."""
    given = Operands(*operands)
    q, k = given.q, given.k

    def statistics(x: Tensor | None, weight: Tensor | None) -> Tensor:
        if x is None or weight is None:
            return q.new_empty(0)
        return x.new_empty(x.shape[:-1], dtype=wide(x.dtype))

    y_k = q.new_empty(0) if k is None else fresh_like(k)
    return fresh_like(q), y_k, statistics(q, given.q_norm_weight), statistics(k, given.k_norm_weight)


def gradients(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates the gradients of q, k and both gains, empty for operands that are None."""
    given = GivenToBackward(*inputs)
    dq, dk, dq_weight, dk_weight = gradients_like(given.dy, given.dy_k, given.q_norm_weight, given.k_norm_weight)
    return dq, dk, dq_weight, dk_weight


def _saves(results: tuple[Tensor, ...], *operands: Unpack[Operands]) -> tuple[object, ...]:
    """What backward gets: q and k only if they are normalized."""
    given = Operands(*operands)
    q = None if given.q_norm_weight is None else given.q
    k = None if given.k_norm_weight is None else given.k
    return q, k, *given[2:7], *results[2:], *given[7:]


OPERATOR = Operator(
    outputs, gradients, of=("q", "k", "q_norm_weight", "k_norm_weight"), saves=_saves, num_differentiable=2
)


def _forward(*operands: Unpack[Operands]) -> Outputs:
    given = Operands(*operands)
    y, y_k, q_rstd, k_rstd = results = outputs(*operands)
    table, how, k = given.table, given.rotation, given.k
    _rotate_rows(given.q, given.q_norm_weight, table, how, y, q_rstd)
    if k is not None:
        _rotate_rows(k, given.k_norm_weight, table, how, y_k, k_rstd)
    return results


def _backward(*inputs: Unpack[GivenToBackward]) -> Outputs:
    of_q, of_k, table, back = GivenToBackward(*inputs).parts()
    dq, dk, dq_weight, dk_weight = results = gradients(*inputs)
    for heads, dx, dweight in ((of_q, dq, dq_weight), (of_k, dk, dk_weight)):
        if heads.weight is not None:
            _rotate_and_normalize_back(heads, table, back, dx, dweight)
        elif heads.dy.dim() > 1:
            _rotate_rows(heads.dy, None, table, back, dx, heads.rstd)
    return results


def _rotate_rows(x: Tensor, weight: Tensor | None, table: Tables, how: Rotation, y: Tensor, rstd: Tensor) -> None:
    """Fills ``y`` with the rotated ``x`` [S, B, A, D]; given ``weight``, normalizes first and also fills ``rstd``."""
    if weight is not None:

        def normalized(x: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
            normed, rstd = normalize(x, weight, how)
            return rotate(normed, table.block(*rows), how), rstd

        by_blocks(normalized, (x, *table.rows()), (y, rstd))
        return

    def rotated(both: Tensor, *rows: Any) -> tuple[Tensor, ...]:
        *its_rows, out = rows
        return rotate_pairs(both, table.block(*its_rows), how, out)

    before, both, after = columns(x, table, how)
    y_before, y_both, y_after = columns(y, table, how)
    widened_by_blocks(rotated, (both, *table.rows()), pairs_written(y_both, how), acc=wide(x.dtype))
    if before.shape[-1] + after.shape[-1]:
        y_before.copy_(before)
        y_after.copy_(after)


def _rotate_and_normalize_back(heads: Heads, table: Tables, back: Rotation, dx: Tensor, dweight: Tensor) -> None:
    dy, x, weight, rstd = heads
    assert weight is not None, "called for normalized heads only"
    total = dweight.zero_().to(wide(dy.dtype))

    def formula(dy: Tensor, x: Tensor, rstd: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        return normalize_back(rotate(dy, table.block(*rows), back), x, weight, rstd, back)

    by_blocks(formula, (dy, x, rstd, *table.rows()), (dx,), (total,))
    dweight.copy_(total)


def _whole_backward(*inputs: Unpack[GivenToBackward]) -> Outputs:
    of_q, of_k, table, back = GivenToBackward(*inputs).parts()

    def of(heads: Heads) -> tuple[Tensor, Tensor]:
        dy, x, weight, rstd = heads
        if x is None or weight is None:
            return rotate(dy, table, back, dy.dtype) if dy.dim() > 1 else dy.clone(), dy.new_empty(0)
        dx, dweight = normalize_back(rotate(dy, table, back), x, weight, rstd, back)
        return dx, dweight.to(weight.dtype)

    (dq, dq_weight), (dk, dk_weight) = of(of_q), of(of_k)
    return dq, dk, dq_weight, dk_weight


blocked = OPERATOR.register("rope_blocked", _forward, _backward, opaque=True)
# not by blocks: the compiler concatenates the halves of a head in its own memory, and would copy them to given outputs
compiled = OPERATOR.register(
    "rope_compiled",
    CompiledFormula(reference, shares_vectors=True),
    CompiledFormula(_whole_backward, shares_vectors=True),
    opaque=True,
)
