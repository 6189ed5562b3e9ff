"""Formulas of ``megalith.fusions.fused_rope``, whose head states them; the rotation itself is in ``rotation``.

S sequence, B micro-batch, A heads, G kv groups, D head size, R rotated features.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megalith.fusions.formulas.rotation import Rotation, Tables, normalize, normalize_back, turn, turn_into
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.blocks import blocks
from megalith.fusions.paths.library import Operator, gradients_like

__all__ = ["OPERATOR", "Outputs", "blocked", "gradients", "outputs", "reference"]

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
            return turn(x, table, how).to(x.dtype), q.new_empty(0)
        normed, rstd = normalize(x, weight, how)
        return turn(normed, table, how).to(x.dtype), rstd

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


def _saves(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What backward gets: q and k only where they are normalised."""
    q, k, cos, sin, positions, q_norm_weight, k_norm_weight, *options = inputs
    kept_q, kept_k = None if q_norm_weight is None else q, None if k_norm_weight is None else k
    return kept_q, kept_k, cos, sin, positions, q_norm_weight, k_norm_weight, *results[2:], *options


OPERATOR = Operator(
    outputs, gradients, of=("q", "k", "q_norm_weight", "k_norm_weight"), saves=_saves, num_differentiable=2
)


def _forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    *options: Any,
) -> Outputs:
    results = outputs(q, k, cos, sin, positions, q_norm_weight, k_norm_weight, *options)
    y, y_k, q_rstd, k_rstd = results
    table, how = Tables(cos, sin, positions), Rotation(*options)
    _turn_blocks(q, q_norm_weight, table, how, y, q_rstd)
    if k is not None:
        _turn_blocks(k, k_norm_weight, table, how, y_k, k_rstd)
    return results


def _backward(
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
    *options: Any,
) -> Outputs:
    weights = q_norm_weight, k_norm_weight
    results = gradients(dy, dy_k, q, k, cos, sin, positions, *weights, q_rstd, k_rstd, *options)
    dq, dk, dq_weight, dk_weight = results
    table, how = Tables(cos, sin, positions), Rotation(*options)
    back = how._replace(inverse=not how.inverse)
    _turn_back_blocks(dy, q, q_norm_weight, q_rstd, table, back, dq, dq_weight)
    if dy_k.dim() > 1:
        _turn_back_blocks(dy_k, k, k_norm_weight, k_rstd, table, back, dk, dk_weight)
    return results


def _turn_blocks(x: Tensor, weight: Tensor | None, table: Tables, how: Rotation, y: Tensor, rstd: Tensor) -> None:
    R, D = 2 * table.cos.shape[-1], x.shape[-1]
    for block, its_table in _blocks(x, table, R if weight is None else D):
        rows = x[block]
        if weight is not None:
            rows, rstd[block] = normalize(rows, weight, how)
        turn_into(y[block], rows, its_table, how)


def _turn_back_blocks(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    table: Tables,
    how: Rotation,
    dx: Tensor,
    dweight: Tensor,
) -> None:
    total = dweight.zero_().to(wide(dy.dtype))
    R, D = 2 * table.cos.shape[-1], dy.shape[-1]
    for block, its_table in _blocks(dy, table, R if weight is None else D):
        if x is None or weight is None:
            turn_into(dx[block], dy[block], its_table, how)
        else:
            g = total.new_empty(dy[block].shape)
            turn_into(g, dy[block], its_table, how)
            dx[block], part = normalize_back(g, x[block], weight, rstd[block], how)
            total += part
    dweight.copy_(total)


def _blocks(x: Tensor, table: Tables, num_columns: int) -> Iterator[tuple[slice, Tables]]:
    """Blocks of the tokens of ``x`` [S, B, A, D], and their tables; of each token ``num_columns`` are computed."""
    for block in blocks(len(x), num_columns * x[:1, ..., 0].numel()):
        yield block, table.block(*(rows[block] for rows in table.rows()))


blocked = OPERATOR.register("rope_blocked", _forward, _backward, opaque=True)
