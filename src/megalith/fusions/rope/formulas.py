"""Formulas of ``rope``, whose head states them; the rotation itself is in ``rotation``.

S sequence, B micro-batch, A heads, G kv groups, D head size, R rotated features.
"""

from typing import Any, NamedTuple

from torch import Tensor

from megalith.fusions.core.blocks import by_blocks, widened_by_blocks
from megalith.fusions.core.compiled_blocks import compiled_whole
from megalith.fusions.core.registration import Operator, gradients_like
from megalith.fusions.core.rows import wide
from megalith.fusions.rope.rotation import (
    Rotation,
    Tables,
    columns,
    normalize,
    normalize_back,
    pairs_written,
    turn,
    turn_pairs,
)

__all__ = ["OPERATOR", "Outputs", "blocked", "compiled", "gradients", "outputs", "reference"]

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def reference(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    *options: Any,
) -> Outputs:
    """q and k, turned, and 1 / root mean square of their heads, [S, B, A] and [S, B, G]; empty what does not exist.

    Of q [S, B, A, D], k [S, B, G, D], the fields of ``Tables``, gains [D], and the fields of ``Rotation``.
    """
    table, how = Tables(cos, sin, positions), Rotation(*options)

    def of(x: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if x is None:
            return q.new_empty(0), q.new_empty(0)
        if weight is None:
            return turn(x, table, how, x.dtype), q.new_empty(0)
        normed, rstd = normalize(x, weight, how)
        return turn(normed, table, how, x.dtype), rstd

    (y, rstd), (y_k, k_rstd) = of(q, q_norm_weight), of(k, k_norm_weight)
    return y, y_k, rstd, k_rstd


def outputs(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    layout: str,
    inverse: bool,
    offset: int,
    sections: list[int],
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for what ``reference`` returns."""

    def statistics(x: Tensor | None, weight: Tensor | None) -> Tensor:
        if x is None or weight is None:
            return q.new_empty(0)
        return x.new_empty(x.shape[:-1], dtype=wide(x.dtype))

    y_k = q.new_empty(0) if k is None else k.new_empty(k.shape)
    return q.new_empty(q.shape), y_k, statistics(q, q_norm_weight), statistics(k, k_norm_weight)


def gradients(
    dy: Tensor,
    dy_k: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    layout: str,
    inverse: bool,
    offset: int,
    sections: list[int],
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and both gains, empty for what was not given."""
    dq, dk, dq_weight, dk_weight = gradients_like(dy, dy_k, q_norm_weight, k_norm_weight)
    return dq, dk, dq_weight, dk_weight


def _saves(results: tuple[Tensor, ...], *inputs: Any) -> tuple[object, ...]:
    """What backward gets: q and k only where they are normalised."""
    q, k, cos, sin, positions, q_norm_weight, k_norm_weight, *options = inputs
    kept_q, kept_k = None if q_norm_weight is None else q, None if k_norm_weight is None else k
    return kept_q, kept_k, cos, sin, positions, q_norm_weight, k_norm_weight, *results[2:], *options


OPERATOR = Operator(
    outputs, gradients, of=("q", "k", "q_norm_weight", "k_norm_weight"), saves=_saves, num_differentiable=2
)


def _forward(*inputs: Any) -> Outputs:
    q, k, cos, sin, positions, q_norm_weight, k_norm_weight, *options = inputs
    y, y_k, q_rstd, k_rstd = results = outputs(*inputs)
    table, how = Tables(cos, sin, positions), Rotation(*options)
    _turn_rows(q, q_norm_weight, table, how, y, q_rstd)
    if k is not None:
        _turn_rows(k, k_norm_weight, table, how, y_k, k_rstd)
    return results


class _Heads(NamedTuple):
    """What backward has of q, or of k; dy is empty where there is no k."""

    dy: Tensor
    x: Tensor | None
    weight: Tensor | None
    rstd: Tensor


def _given_to_backward(*inputs: Any) -> tuple[_Heads, _Heads, Tables, Rotation]:
    """Of q and of k, the tables, and the rotation back."""
    dy, dy_k, q, k, cos, sin, positions, q_norm_weight, k_norm_weight, q_rstd, k_rstd, *options = inputs
    how = Rotation(*options)
    back = how._replace(inverse=not how.inverse)
    heads = _Heads(dy, q, q_norm_weight, q_rstd), _Heads(dy_k, k, k_norm_weight, k_rstd)
    return *heads, Tables(cos, sin, positions), back


def _backward(*inputs: Any) -> Outputs:
    of_q, of_k, table, back = _given_to_backward(*inputs)
    dq, dk, dq_weight, dk_weight = results = gradients(*inputs)
    for heads, dx, dweight in ((of_q, dq, dq_weight), (of_k, dk, dk_weight)):
        if heads.weight is not None:
            _turn_and_normalize_back(heads, table, back, dx, dweight)
        elif heads.dy.dim() > 1:
            _turn_rows(heads.dy, None, table, back, dx, heads.rstd)
    return results


def _turn_rows(x: Tensor, weight: Tensor | None, table: Tables, how: Rotation, y: Tensor, rstd: Tensor) -> None:
    """Fills ``y`` with ``x`` [S, B, A, D], turned, and ``rstd``, if its heads are normalised before."""
    if weight is not None:

        def normalized(x: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
            normed, rstd = normalize(x, weight, how)
            return turn(normed, table.block(*rows), how), rstd

        by_blocks(normalized, (x, *table.rows()), (y, rstd))
        return

    def turned(both: Tensor, *rows: Any) -> tuple[Tensor, ...]:
        *its_rows, out = rows
        return turn_pairs(both, table.block(*its_rows), how, out)

    before, both, after = columns(x, table, how)
    y_before, y_both, y_after = columns(y, table, how)
    widened_by_blocks(turned, (both, *table.rows()), pairs_written(y_both, how), acc=wide(x.dtype))
    if before.shape[-1] + after.shape[-1]:
        y_before.copy_(before)
        y_after.copy_(after)


def _turn_and_normalize_back(heads: _Heads, table: Tables, back: Rotation, dx: Tensor, dweight: Tensor) -> None:
    dy, x, weight, rstd = heads
    assert weight is not None, "asked for normalised heads only"
    total = dweight.zero_().to(wide(dy.dtype))

    def formula(dy: Tensor, x: Tensor, rstd: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        return normalize_back(turn(dy, table.block(*rows), back), x, weight, rstd, back)

    by_blocks(formula, (dy, x, rstd, *table.rows()), (dx,), (total,))
    dweight.copy_(total)


def _whole_backward(*inputs: Any) -> Outputs:
    of_q, of_k, table, back = _given_to_backward(*inputs)

    def of(heads: _Heads) -> tuple[Tensor, Tensor]:
        dy, x, weight, rstd = heads
        if x is None or weight is None:
            return turn(dy, table, back, dy.dtype) if dy.dim() > 1 else dy.clone(), dy.new_empty(0)
        dx, dweight = normalize_back(turn(dy, table, back), x, weight, rstd, back)
        return dx, dweight.to(weight.dtype)

    (dq, dq_weight), (dk, dk_weight) = of(of_q), of(of_k)
    return dq, dk, dq_weight, dk_weight


blocked = OPERATOR.register("rope_blocked", _forward, _backward, opaque=True)
# whole, as the compiler joins the halves of a head where it makes them, and would join them twice in given memory
compiled = OPERATOR.register("rope_compiled", compiled_whole(reference), compiled_whole(_whole_backward), opaque=True)
