"""Moves tokens to their experts and back: rows sorted by expert, each weight and each gradient in the same pass.

    permute      permuted[row_of[t, s]] = tokens[t];  weights[row_of[t, s]] = probs[t, s];  gaps are zero
                 dtokens[t] = sum over s of dpermuted[row_of[t, s]];  dprobs[t, s] = dweights[row_of[t, s]]
    unpermute    y[t] = sum over s of probs[t, s] * permuted[row_of[t, s]]
                 dpermuted[row_of[t, s]] = probs[t, s] * dy[t];  dprobs[t, s] = dy[t] . permuted[row_of[t, s]]

over the slots s of token t that have a row. One is the other's gradient. A token's rows are added in float32, by one
program and in one order, that of the experts (of the slots, on a CPU): no atomics.

T tokens, H hidden, E experts, K experts per token, R rows (K T without drops and padding), slots S: E or K.
Saved for backward: the row map; for weighted unpermute also its input and probs.
Floor: (T + R) H elements either way, and R H more for dprobs of unpermute, beside the maps of four bytes an entry.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions.formulas.checks import check_floating, check_one_device, check_shape
from megalith.fusions.formulas.rows import as_rows, wide
from megalith.fusions.paths.backend import Backend, Fusion, compiled
from megalith.fusions.paths.blocks import blocks, by_blocks
from megalith.fusions.paths.library import register
from megalith.fusions.row_map import RowMap, row_map

__all__ = [
    "PERMUTE_FUSION",
    "UNPERMUTE_FUSION",
    "permute",
    "permute_gradients",
    "permute_outputs",
    "unpermute",
    "unpermute_gradients",
    "unpermute_outputs",
]


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    *,
    num_experts: int | None = None,
    pad_multiple: int = 1,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None, RowMap]:
    """Tokens as rows, sorted by expert and then by token, as grouped matrix products take them.

    Args:
        tokens: [T, H] or [..., H], floating; rows may be strided.
        routing_map: [T, E], bool, or the indices of experts [T, K], int32 or int64: see ``row_map``.
        probs: of the shape of ``routing_map``, floating: a weight for each slot.
        num_out_tokens: R. Rows past it are dropped; rows that nothing is routed to are zero. With None the rows are
            counted, and the host waits for the device.
        num_experts: E, of indices.
        pad_multiple: the rows of each expert are filled up with zeros to a multiple of this: 16 for most fp8 recipes.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        permuted [R, H]; the weight of each row [R], zero in gaps, or None without ``probs``; and the row map.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: see ``row_map``.
        BackendError: ``backend`` cannot run on ``tokens``.
    """
    check_floating(tokens=tokens, probs=probs)
    check_one_device(tokens=tokens, routing_map=routing_map, probs=probs)
    if tokens.dim() < 2 or routing_map.dim() == 0 or tokens.shape[:-1].numel() != routing_map.shape[0]:
        shapes = f"tokens {list(tokens.shape)} and routing_map {list(routing_map.shape)}"
        raise ShapeError(f"tokens [..., H] must be one for each row of routing_map; got {shapes}")
    check_shape("probs", probs, routing_map.shape, "one for each entry of routing_map")
    compute = PERMUTE_FUSION.path(tokens, backend)
    rows = row_map(routing_map, num_out_tokens, num_experts=num_experts, pad_multiple=pad_multiple, backend=backend)
    permuted, weights = compute(as_rows(tokens), probs, rows.row_of, rows.token_of)
    return permuted, None if probs is None else weights, rows


def unpermute(
    permuted_tokens: Tensor,
    row_map: RowMap,
    restore_shape: Sequence[int] | None = None,
    probs: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """The sum of each token's rows, weighted by ``probs`` if given; zero for a token that has none.

    Args:
        permuted_tokens: [R, H], floating, in the order that ``permute`` made; rows may be strided.
        row_map: what ``permute`` returned.
        restore_shape: the shape of the result, [..., H] with T tokens; by default [T, H].
        probs: a weight for each slot, of the shape of the routing that ``permute`` was given. Where the weight is
            applied inside of the experts, leave it out.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        ``restore_shape``, in the dtype of ``permuted_tokens``; summed in float32 and rounded once.

    Raises:
        ShapeError: the tensors do not fit together.
        BackendError: ``backend`` cannot run on ``permuted_tokens``.
    """
    row_of, token_of, _ = row_map
    check_floating(permuted_tokens=permuted_tokens, probs=probs)
    check_one_device(permuted_tokens=permuted_tokens, row_map=row_of, probs=probs)
    if permuted_tokens.dim() != 2 or len(permuted_tokens) != len(token_of):
        wanted = f"[{len(token_of)}, H], a row for each of row_map"
        raise ShapeError(f"permuted_tokens must be {wanted}; got {list(permuted_tokens.shape)}")
    check_shape("probs", probs, row_of.shape, "one for each slot of row_map")
    shape = [len(row_of), permuted_tokens.shape[1]] if restore_shape is None else list(restore_shape)
    if not shape or [math.prod(shape[:-1]), shape[-1]] != [len(row_of), permuted_tokens.shape[1]]:
        raise ShapeError(
            f"restore_shape must be {len(row_of)} tokens of {permuted_tokens.shape[1]} columns; got {shape}"
        )
    return UNPERMUTE_FUSION.path(permuted_tokens, backend)(permuted_tokens, probs, row_of, token_of).view(shape)


def _permute(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: permuted [R, H] and the weights of its rows [R], empty without probs."""
    T, H = tokens.shape
    rows = tokens.to(wide(tokens.dtype))  # so that gradients of a token's rows are added in it
    with_zero = torch.cat((rows, rows.new_zeros(1, H)))
    permuted = with_zero.index_select(0, token_of.where(token_of >= 0, T)).to(tokens.dtype)
    return permuted, tokens.new_empty(0) if probs is None else _by_row(probs, row_of, len(token_of))


def _unpermute(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    """Reference: y [T, H]. Gaps go to a row past the last token."""
    T, rows = len(row_of), permuted.to(wide(permuted.dtype))
    if probs is not None:
        rows = rows * _by_row(probs.to(rows.dtype), row_of, len(token_of))[:, None]
    y = rows.new_zeros(T + 1, rows.shape[1]).index_add_(0, token_of.where(token_of >= 0, T), rows)
    return y[:T].to(permuted.dtype)


def _by_row(probs: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    """``probs`` of the slots, as weights of the rows; slots without a row go past the last."""
    row = row_of.where(row_of >= 0, num_rows).flatten().to(torch.int64)
    return probs.new_zeros(num_rows + 1).scatter_(0, row, probs.flatten())[:num_rows]


def _by_slot(weights: Tensor, row_of: Tensor) -> Tensor:
    """``weights`` of the rows, at the slots; zero for slots without a row."""
    with_zero = torch.nn.functional.pad(weights, (0, 1))
    return with_zero[row_of.where(row_of >= 0, len(weights)).to(torch.int64)]


def _permute_blocked(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    weights = tokens.new_empty(0) if probs is None else _by_row(probs, row_of, len(token_of)).clone()
    return _rows_of(tokens, token_of), weights


def _permute_blocked_back(
    dpermuted: Tensor, dweights: Tensor, row_of: Tensor, has_probs: bool
) -> tuple[Tensor, Tensor]:
    return _sums_of(dpermuted, None, row_of), _by_slot(dweights, row_of) if has_probs else dweights.new_empty(0)


def _unpermute_blocked(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    return _sums_of(permuted, probs, row_of)


def _unpermute_blocked_back(
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
        table = permuted.index_select(0, rows[bag]).to(acc)  # bags want weights of the dtype of the table
        sums[block] = _bags(table, torch.arange(len(table)), sizes[block], weights[bag])
    return sums


def _bags(table: Tensor, rows: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of ``sizes`` rows each, out of all the ``rows`` of ``table``: accumulated in float32, rounded once."""
    if rows.numel() == 0 or table.numel() == 0:
        return table.new_zeros(len(sizes), table.shape[1])
    first = (sizes.cumsum(0) - sizes).to(rows.dtype)
    return torch.nn.functional.embedding_bag(rows, table, first, mode="sum", per_sample_weights=weights)


def permute_outputs(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for permuted [R, H] and the weights [R]."""
    R = len(token_of)
    return tokens.new_empty(R, tokens.shape[1]), tokens.new_empty(0) if probs is None else probs.new_empty(R)


def permute_gradients(dpermuted: Tensor, dweights: Tensor, row_of: Tensor, has_probs: bool) -> tuple[Tensor, Tensor]:
    """Memory for dtokens [T, H] and dprobs [T, S]."""
    dprobs = dweights.new_empty(row_of.shape if has_probs else 0)
    return dpermuted.new_empty(len(row_of), dpermuted.shape[1]), dprobs


def unpermute_outputs(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    """Memory for y [T, H]."""
    return permuted.new_empty(len(row_of), permuted.shape[1])


def unpermute_gradients(
    dy: Tensor, permuted: Tensor | None, probs: Tensor | None, row_of: Tensor, token_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Memory for dpermuted [R, H] and dprobs [T, S]."""
    dprobs = dy.new_empty(0) if probs is None else probs.new_empty(probs.shape)
    return dy.new_empty(len(token_of), dy.shape[1]), dprobs


_blocked_permute_op = register(
    "permute_blocked",
    _permute_blocked,
    permute_outputs,
    _permute_blocked_back,
    permute_gradients,
    gradients_of=("tokens", "probs"),
    saves=lambda inputs, outputs: (inputs[2], inputs[1] is not None),
    num_differentiable=2,
    opaque=True,
)
_blocked_unpermute_op = register(
    "unpermute_blocked",
    _unpermute_blocked,
    unpermute_outputs,
    _unpermute_blocked_back,
    unpermute_gradients,
    gradients_of=("permuted", "probs"),
    saves=lambda inputs, outputs: (None if inputs[1] is None else inputs[0], *inputs[1:]),
    opaque=True,
)


def _triton_permute(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    from megalith.fusions.kernels.permute import permute_op

    return permute_op(tokens, probs, row_of, token_of)


def _triton_unpermute(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    from megalith.fusions.kernels.permute import unpermute_op

    return unpermute_op(permuted, probs, row_of, token_of)


_PERMUTE: Mapping[Backend, Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "triton": _triton_permute,
    "compile": compiled(_permute),
    "blocked": _blocked_permute_op,
    "reference": _permute,
}
_UNPERMUTE: Mapping[Backend, Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]] = {
    "triton": _triton_unpermute,
    "compile": compiled(_unpermute),
    "blocked": _blocked_unpermute_op,
    "reference": _unpermute,
}
PERMUTE_FUSION = Fusion("permute", _PERMUTE)
UNPERMUTE_FUSION = Fusion("unpermute", _UNPERMUTE)
