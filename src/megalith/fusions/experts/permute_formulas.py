"""Implements the formulas stated in ``permute``.

T tokens, R rows, H hidden, S slots of a token.
"""

import torch
from torch import Tensor

from megalith.fusions.core.blocks import blocks, by_blocks
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import fresh_like, wide

__all__ = [
    "PERMUTE_OPERATOR",
    "UNPERMUTE_OPERATOR",
    "permute_blocked",
    "permute_reference",
    "unpermute_blocked",
    "unpermute_reference",
]


def permute_reference(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    """permuted [R, H] and the weights of its rows [R], empty without probs."""
    T, H = tokens.shape
    rows = tokens.to(wide(tokens.dtype))  # so that the gradients of a token's rows are summed in this dtype
    with_zero = torch.cat((rows, rows.new_zeros(1, H)))
    permuted = with_zero.index_select(0, token_of.where(token_of >= 0, T)).to(tokens.dtype)
    return permuted, tokens.new_empty(0) if probs is None else _by_row(probs, row_of, len(token_of))


def unpermute_reference(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    """y [T, H]. Gaps are added to an extra row after the last token."""
    T, rows = len(row_of), permuted.to(wide(permuted.dtype))
    if probs is not None:
        rows = rows * _by_row(probs.to(rows.dtype), row_of, len(token_of))[:, None]
    y = rows.new_zeros(T + 1, rows.shape[1]).index_add_(0, token_of.where(token_of >= 0, T), rows)
    return y[:T].to(permuted.dtype)


def _by_row(probs: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    """Converts ``probs`` per slot to weights per row; slots without a row are written past the last row."""
    row = row_of.where(row_of >= 0, num_rows).flatten().to(torch.int64)
    return probs.new_zeros(num_rows + 1).scatter_(0, row, probs.flatten())[:num_rows]


def _by_slot(weights: Tensor, row_of: Tensor) -> Tensor:
    """Converts ``weights`` per row to weights per slot; zero for slots without a row."""
    with_zero = torch.nn.functional.pad(weights, (0, 1))
    return with_zero[row_of.where(row_of >= 0, len(weights)).to(torch.int64)]


def _permute_outputs(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates permuted [R, H] and the weights [R]."""
    R = len(token_of)
    return tokens.new_empty(R, tokens.shape[1]), tokens.new_empty(0) if probs is None else probs.new_empty(R)


def _permute_gradients(dpermuted: Tensor, dweights: Tensor, row_of: Tensor, has_probs: bool) -> tuple[Tensor, Tensor]:
    """Allocates dtokens [T, H] and dprobs [T, S]."""
    dprobs = dweights.new_empty(row_of.shape if has_probs else 0)
    return dpermuted.new_empty(len(row_of), dpermuted.shape[1]), dprobs


def _permute_saves(
    _: tuple[Tensor, ...], tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor
) -> tuple[object, ...]:
    return row_of, probs is not None


PERMUTE_OPERATOR = Operator(
    _permute_outputs, _permute_gradients, of=("tokens", "probs"), saves=_permute_saves, num_differentiable=2
)


def _unpermute_outputs(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    """Allocates y [T, H]."""
    return permuted.new_empty(len(row_of), permuted.shape[1])


def _unpermute_gradients(
    dy: Tensor, permuted: Tensor | None, probs: Tensor | None, row_of: Tensor, token_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Allocates dpermuted [R, H] and dprobs [T, S]."""
    dprobs = dy.new_empty(0) if probs is None else fresh_like(probs)
    return dy.new_empty(len(token_of), dy.shape[1]), dprobs


def _unpermute_saves(
    _: tuple[Tensor, ...], permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor
) -> tuple[object, ...]:
    return (None if probs is None else permuted), probs, row_of, token_of


UNPERMUTE_OPERATOR = Operator(
    _unpermute_outputs, _unpermute_gradients, of=("permuted", "probs"), saves=_unpermute_saves
)


def _permute(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    weights = tokens.new_empty(0) if probs is None else _by_row(probs, row_of, len(token_of)).clone()
    return _rows_of(tokens, token_of), weights


def _permute_back(dpermuted: Tensor, dweights: Tensor, row_of: Tensor, has_probs: bool) -> tuple[Tensor, Tensor]:
    return _sums_of(dpermuted, None, row_of), _by_slot(dweights, row_of) if has_probs else dweights.new_empty(0)


def _unpermute(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    return _sums_of(permuted, probs, row_of)


def _unpermute_back(
    dy: Tensor, permuted: Tensor | None, probs: Tensor | None, row_of: Tensor, token_of: Tensor
) -> tuple[Tensor, Tensor]:
    if permuted is None or probs is None:
        return _rows_of(dy, token_of), dy.new_empty(0)
    acc = wide(dy.dtype)
    dpermuted, dots = dy.new_empty(permuted.shape), dy.new_empty(len(token_of), dtype=acc)

    def formula(token_of: Tensor, weights: Tensor, permuted: Tensor) -> tuple[Tensor, Tensor]:
        dy_rows = _rows_of(dy, token_of).to(acc)
        return dy_rows * weights[:, None], (dy_rows * permuted.to(acc)).sum(dim=-1)

    by_blocks(formula, (token_of, _by_row(probs.to(acc), row_of, len(token_of)), permuted), (dpermuted, dots))
    return dpermuted, _by_slot(dots, row_of).to(probs.dtype)


def _rows_of(tokens: Tensor, token_of: Tensor) -> Tensor:
    """The token of each row; zero in gaps."""
    if len(tokens) == 0:
        return tokens.new_zeros(len(token_of), tokens.shape[1])
    gap = token_of < 0
    rows = tokens.index_select(0, token_of.clamp_min(0))
    return rows.masked_fill_(gap[:, None], 0.0) if gap.any() else rows


def _sums_of(permuted: Tensor, probs: Tensor | None, row_of: Tensor) -> Tensor:
    """The sum of each token's rows, weighted by ``probs``, in the order of its slots."""
    routed, acc = row_of >= 0, wide(permuted.dtype)
    rows, sizes = row_of[routed], routed.sum(dim=1)
    weights = None if probs is None else probs[routed].to(acc)
    if weights is None or acc == permuted.dtype:
        return _bags(permuted, rows, sizes, weights)
    sums, ends = permuted.new_empty(len(row_of), permuted.shape[1]), torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    for block in blocks(len(row_of), permuted.shape[1] * -(-len(rows) // max(1, len(row_of)))):
        bag = slice(int(ends[block.start]), int(ends[block.stop]))
        table = permuted.index_select(0, rows[bag]).to(acc)  # embedding_bag requires weights in the dtype of the table
        sums[block] = _bags(table, torch.arange(len(table)), sizes[block], weights[bag])
    return sums


def _bags(table: Tensor, rows: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of consecutive groups of ``sizes`` of the ``rows`` of ``table``: accumulated in float32, rounded once."""
    if rows.numel() == 0 or table.numel() == 0:
        return table.new_zeros(len(sizes), table.shape[1])
    first = (sizes.cumsum(0) - sizes).to(rows.dtype)
    return torch.nn.functional.embedding_bag(rows, table, first, mode="sum", per_sample_weights=weights)


permute_blocked = PERMUTE_OPERATOR.register("permute_blocked", _permute, _permute_back, opaque=True)
unpermute_blocked = UNPERMUTE_OPERATOR.register("unpermute_blocked", _unpermute, _unpermute_back, opaque=True)
