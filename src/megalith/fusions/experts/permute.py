"""Moves tokens to their experts and back: rows sorted by expert, with weights and gradients in the same pass.

    permute      permuted[row_of[t, s]] = tokens[t];  weights[row_of[t, s]] = probs[t, s];  gaps are zero
                 dtokens[t] = sum over s of dpermuted[row_of[t, s]];  dprobs[t, s] = dweights[row_of[t, s]]
    unpermute    y[t] = sum over s of probs[t, s] * permuted[row_of[t, s]]
                 dpermuted[row_of[t, s]] = probs[t, s] * dy[t];  dprobs[t, s] = dy[t] . permuted[row_of[t, s]]

over the slots s of token t that have a row. Each is the other's gradient. A token's rows are summed in float32, by one
program and in a fixed order, that of the experts (on a CPU, of the slots), without atomics.

T tokens, H hidden, E experts, K experts per token, R rows (K T without drops and padding), slots S: E or K.
Saved for backward: the row map; for weighted unpermute also its input and probs.
Lower bound: (T + R) H elements each way, plus R H for dprobs of unpermute and maps of four bytes per entry.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows
from megalith.fusions.experts.permute_formulas import (
    permute_blocked,
    permute_reference,
    unpermute_blocked,
    unpermute_reference,
)
from megalith.fusions.experts.row_map import RowMap, row_map

__all__ = [
    "PERMUTE_FUSION",
    "UNPERMUTE_FUSION",
    "permute",
    "permute_by",
    "unpermute",
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
    """Returns tokens as rows, sorted by expert and then by token, as grouped matrix products expect them.

    Args:
        tokens: [T, H] or [..., H], floating point; rows may be strided.
        routing_map: [T, E], bool, or expert indices [T, K], int32 or int64: see ``row_map``.
        probs: in the shape of ``routing_map``, floating point: a weight for each slot.
        num_out_tokens: R. Rows beyond it are dropped; rows that nothing is routed to are zero. If None, the rows are
            counted, which causes a host sync.
        num_experts: E, required with indices.
        pad_multiple: the rows of each expert are padded with zeros to a multiple of this: 16 for most fp8 recipes.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

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
        raise ShapeError(f"tokens must be [..., H], one for each row of routing_map; got {shapes}")
    check_shape("probs", probs, routing_map.shape, "one for each entry of routing_map")
    rows = row_map(routing_map, num_out_tokens, num_experts=num_experts, pad_multiple=pad_multiple, backend=backend)
    permuted, weights = permute_by(tokens, rows, probs, backend=backend)
    return permuted, weights, rows


def permute_by(
    tokens: Tensor, row_map: RowMap, probs: Tensor | None = None, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor | None]:
    """``permute`` with a given row map.

    Args:
        tokens: [T, H] or [..., H], floating point; rows may be strided.
        row_map: for the T tokens.
        probs: a weight for each slot of ``row_map``, floating point.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        permuted [R, H], and the weight of each row [R], zero in gaps, or None without ``probs``.

    Raises:
        ShapeError: the tensors do not fit together.
        BackendError: ``backend`` cannot run on ``tokens``.
    """
    check_floating(tokens=tokens, probs=probs)
    check_one_device(tokens=tokens, row_map=row_map.row_of, probs=probs)
    if tokens.dim() < 2 or tokens.shape[:-1].numel() != len(row_map.row_of):
        raise ShapeError(
            f"tokens must be [..., H], the {len(row_map.row_of)} tokens of row_map; got {list(tokens.shape)}"
        )
    check_shape("probs", probs, row_map.row_of.shape, "one for each slot of row_map")
    compute = PERMUTE_FUSION.path(tokens, backend)
    permuted, weights = compute(as_rows(tokens), probs, row_map.row_of, row_map.token_of)
    return permuted, None if probs is None else weights


def unpermute(
    permuted_tokens: Tensor,
    row_map: RowMap,
    restore_shape: Sequence[int] | None = None,
    probs: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Returns the sum of each token's rows, weighted by ``probs`` if given; zero for a token without rows.

    Args:
        permuted_tokens: [R, H], floating point, in the order of ``permute``; rows may be strided.
        row_map: as returned by ``permute``.
        restore_shape: the shape of the result, [..., H] with T tokens; defaults to [T, H].
        probs: a weight for each slot, in the shape of the routing passed to ``permute``. Omit it if the experts apply
            the weights themselves.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

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
        wanted = f"[{len(token_of)}, H], one row for each row of row_map"
        raise ShapeError(f"permuted_tokens must be {wanted}; got {list(permuted_tokens.shape)}")
    check_shape("probs", probs, row_of.shape, "one for each slot of row_map")
    shape = [len(row_of), permuted_tokens.shape[1]] if restore_shape is None else list(restore_shape)
    if not shape or [math.prod(shape[:-1]), shape[-1]] != [len(row_of), permuted_tokens.shape[1]]:
        raise ShapeError(
            f"restore_shape must hold {len(row_of)} tokens of {permuted_tokens.shape[1]} columns; got {shape}"
        )
    return UNPERMUTE_FUSION.path(permuted_tokens, backend)(permuted_tokens, probs, row_of, token_of).view(shape)


def _triton_permute(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    from megalith.fusions.experts.kernels.permute import permute_op

    return permute_op(tokens, probs, row_of, token_of)


def _triton_unpermute(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    from megalith.fusions.experts.kernels.permute import unpermute_op

    return unpermute_op(permuted, probs, row_of, token_of)


_PERMUTE: Mapping[Backend, Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "triton": _triton_permute,
    "compile": compiled(permute_reference),
    "blocked": permute_blocked,
    "reference": permute_reference,
}
_UNPERMUTE: Mapping[Backend, Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]] = {
    "triton": _triton_unpermute,
    "compile": compiled(unpermute_reference),
    "blocked": unpermute_blocked,
    "reference": unpermute_reference,
}
PERMUTE_FUSION = registered(Fusion("permute", _PERMUTE, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))
UNPERMUTE_FUSION = registered(Fusion("unpermute", _UNPERMUTE, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))
