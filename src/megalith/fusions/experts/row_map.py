"""The destination rows of permuted tokens: sorted by expert, then by token, with each expert optionally padded.

    rows_per_expert[e] = routed tokens of e, rounded up to a multiple of pad_multiple
    row of (t, e)      = sum of rows_per_expert[e'] over e' < e, plus the tokens before t that are routed to e

T tokens, E experts, K experts per token, R rows. A routing is a map [T, E] or indices [T, K]. It is read twice, once to
count per tile of tokens and once to assign rows, in integers and without atomics, so the result is deterministic.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_indices
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.experts.row_map_formulas import blocked, counts_of, padded_to, reference

__all__ = ["FUSION", "RowMap", "row_map"]


class RowMap(NamedTuple):
    """The rows of each token, and the token of each row; all int32, on the device of the routing.

    row_of           [T, E] for a map, [T, K] for indices: the row of this slot, -1 if not routed, or dropped
    token_of         [R]: the token in this row, -1 in a gap: padding, or past the last routed token
    rows_per_expert  [E]: rows of each expert including padding, the sizes that grouped matrix products take
    """

    row_of: Tensor
    token_of: Tensor
    rows_per_expert: Tensor

    def up_to(self, num_rows: int) -> "RowMap":
        """The map of the first ``num_rows`` rows; all later rows must be gaps."""
        # not _replace: its fields are lost when torch.compile before 2.13 breaks the graph
        return RowMap(self.row_of, self.token_of[:num_rows], self.rows_per_expert)


def row_map(
    routing_map: Tensor,
    num_out_tokens: int | None = None,
    *,
    num_experts: int | None = None,
    pad_multiple: int = 1,
    backend: Backend | None = None,
) -> RowMap:
    """Returns the rows that ``permute`` moves tokens to; can be reused for all tensors with the same routing.

    Args:
        routing_map: [T, E], bool; or expert indices [T, K], int32 or int64, where those outside [0, num_experts) are
            skipped, and an expert that occurs twice gets two rows.
        num_out_tokens: R. Rows beyond it are dropped; unused rows are gaps at the end. If None, rows are counted, which
            causes a host sync.
        num_experts: E, required with indices; a map has E columns.
        pad_multiple: the rows of each expert are padded to a multiple of this by gaps.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Raises:
        ShapeError: ``routing_map`` is neither of the two.
        ConfigError: ``num_experts`` is missing, or given together with a map; a count is negative or ``pad_multiple``
            zero.
        BackendError: ``backend`` cannot run on ``routing_map``.
    """
    E = _check(routing_map, num_out_tokens, num_experts, pad_multiple)
    compute = FUSION.path(routing_map, backend)
    if num_out_tokens is None:
        num_out_tokens = int(padded_to(counts_of(routing_map, E), pad_multiple).sum())
    return RowMap(*compute(routing_map, num_out_tokens, E, pad_multiple))


def _triton(
    routing_map: Tensor, num_out_tokens: int, num_experts: int, pad_multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.experts.kernels.row_map import op

    return op(routing_map, num_out_tokens, num_experts, pad_multiple)


_PATHS: Mapping[Backend, Callable[[Tensor, int, int, int], tuple[Tensor, Tensor, Tensor]]] = {
    "triton": _triton,
    "compile": compiled(reference),
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("row_map", _PATHS, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))


def _check(routing_map: Tensor, num_out_tokens: int | None, num_experts: int | None, pad_multiple: int) -> int:
    """Checks the arguments and returns the number of experts."""
    if routing_map.dim() != 2:
        raise ShapeError(f"routing_map must be [T, E], or indices [T, K]; got {list(routing_map.shape)}")
    if pad_multiple < 1:
        raise ConfigError(f"pad_multiple must be 1 or more rows; got {pad_multiple}")
    if num_out_tokens is not None and num_out_tokens < 0:
        raise ConfigError(f"num_out_tokens must be 0 or more rows, or None to count them; got {num_out_tokens}")
    if routing_map.dtype == torch.bool:
        if num_experts is not None:
            raise ConfigError("num_experts is only for indices; leave it out for a bool routing_map [T, E]")
        return routing_map.shape[1]
    check_indices(routing_map=routing_map)
    if num_experts is None or num_experts < 1:
        raise ConfigError(f"num_experts must be 1 or more for indices; got {num_experts} (a routing map must be bool)")
    return num_experts
