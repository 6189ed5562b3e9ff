"""Differentiable collectives: the backward of each is the adjoint of its forward, over the same group.

    region                          forward                    backward
    copy_to_tensor_model_parallel   identity                   all-reduce
    reduce_from_...                 all-reduce                 identity
    scatter_to_... (last dim)       own slice                  all-gather
    gather_from_... (last dim)      all-gather                 own slice
    scatter_to_sequence_parallel    own slice of dim 0         all-gather
    gather_from_sequence_parallel   all-gather along dim 0     reduce-scatter, or own slice if the consumer's
                                                               gradient is the same on all ranks
    reduce_scatter_to_sequence_...  reduce-scatter of dim 0    all-gather
    all_gather_last_dim_...         all-gather                 reduce-scatter
    reduce_scatter_last_dim_...     reduce-scatter             all-gather
    all_to_all (dim 0)              all-to-all                 all-to-all back
    begin_all_to_all, end_...       the same, overlapped with other computation in forward and backward

W is the size of the group. With a group of None or of one rank, each of these is the identity. Inputs may be strided
and are never written to; outputs are contiguous. Sums are accumulated in the dtype of the input. Every rank of the
group must make the same calls in the same order.

Narayanan et al. 2021, arXiv:2104.04473; Korthikanti et al. 2022, arXiv:2205.05198 for sequence parallelism.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megalith.errors import ShapeError
from megalith.torch_compat.distributed import all_gather_into, reduce_scatter_into

__all__ = [
    "PendingAllToAll",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "begin_all_to_all",
    "copy_to_tensor_model_parallel_region",
    "end_all_to_all",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]

_Move = Callable[[Tensor, ProcessGroup], Tensor]


def copy_to_tensor_model_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns ``x``, the same on all ranks, for consumers that differ per rank: gradients are summed over the ranks."""
    return _moved(x, group, _identity, _all_reduce)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the sum of ``x`` over ``group``, on all its ranks."""
    return _moved(x, group, _all_reduce, _identity)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[..., n] the same on all ranks -> [..., n/W], this rank's slice. ShapeError if n is not divisible."""
    return _moved(x, group, partial(_slice, dim=-1), partial(_all_gather, dim=-1))


def gather_from_tensor_model_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[..., n] -> [..., W n], for a consumer that computes the same on all ranks."""
    return _moved(x, group, partial(_all_gather, dim=-1), partial(_slice, dim=-1))


def scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[S, ...] the same on all ranks -> [S/W, ...], this rank's slice. ShapeError if S is not divisible."""
    return _moved(x, group, partial(_slice, dim=0), partial(_all_gather, dim=0))


def gather_from_sequence_parallel_region(
    x: Tensor, group: ProcessGroup | None, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """[S/W, ...] -> [S, ...].

    With ``tensor_parallel_output_grad``, each rank uses the result differently, so gradients are summed over the ranks.
    Otherwise gradients are the same on all ranks, and each takes its slice.
    """
    back = _reduce_scatter if tensor_parallel_output_grad else _slice
    return _moved(x, group, partial(_all_gather, dim=0), partial(back, dim=0))


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[S, ...] -> [S/W, ...], this rank's slice of the sum over ``group``. ShapeError if S is not divisible."""
    return _moved(x, group, partial(_reduce_scatter, dim=0), partial(_all_gather, dim=0))


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[..., n] -> [..., W n], for consumers that differ per rank: gradients are summed over the ranks."""
    return _moved(x, group, partial(_all_gather, dim=-1), partial(_reduce_scatter, dim=-1))


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[..., n] -> [..., n/W], this rank's slice of the sum over ``group``. ShapeError if n is not divisible."""
    return _moved(x, group, partial(_reduce_scatter, dim=-1), partial(_all_gather, dim=-1))


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sends part i of ``x`` [T, ...] to rank i, and returns what each rank sent here, in rank order.

    Args:
        x: rows to send.
        group: the ranks.
        output_split_sizes: rows to receive from each rank; None: T/W from each.
        input_split_sizes: rows to send to each rank; None: T/W to each.

    Raises:
        ShapeError: T is not divisible by W, a list does not have W counts, or the input sizes do not sum to T.
    """
    if group is None or group.size() == 1:
        return x
    sent, received = _split_sizes(x, group.size(), output_split_sizes, input_split_sizes)
    forward = partial(_all_to_all, sent=sent, received=received)
    return _moved(x, group, forward, partial(_all_to_all, sent=received, received=sent))


@dataclass(eq=False)
class PendingAllToAll:
    """Handle of an asynchronous all-to-all, from ``begin_all_to_all`` to ``end_all_to_all``.

    Attributes:
        rows: the rows sent; stands for the exchange in autograd's graph, because the gradient sent back has this shape.
        buffer: of the rows received; valid after the wait.
    """

    rows: Tensor
    group: ProcessGroup | None = None
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    buffer: Tensor | None = None
    work: dist.Work | None = None

    def start(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Starts sending ``x`` and returns the receive buffer."""
        y = x.new_empty(sum(received), *x.shape[1:])
        self.work = dist.all_to_all_single(
            y, x.contiguous(), list(received), list(sent), group=self.group, async_op=True
        )
        return y

    def wait(self) -> None:
        """Waits for the exchange that ``start`` began."""
        assert self.work is not None, "the exchange has not started"
        self.work.wait()
        self.work = None


def begin_all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> PendingAllToAll:
    """Starts an ``all_to_all`` without waiting: work issued before ``end_all_to_all`` overlaps with it.

    In backward, the gradients of that work are computed while the rows travel back.
    """
    if group is None or group.size() == 1:
        return PendingAllToAll(x)
    sent, received = _split_sizes(x, group.size(), output_split_sizes, input_split_sizes)
    pending = PendingAllToAll(x, group, sent, received)
    pending.rows = _Send.apply(x, pending)
    return pending


def end_all_to_all(pending: PendingAllToAll) -> Tensor:
    """Waits for the exchange and returns the received rows, in rank order."""
    if pending.group is None:
        return pending.rows
    rows: Tensor = _Receive.apply(pending.rows, pending)
    return rows


def _split_sizes(
    x: Tensor, W: int, output_split_sizes: Sequence[int] | None, input_split_sizes: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Returns the rows to and from each of ``W`` ranks. Raises ShapeError if they do not fit ``x``."""
    sent = [_part(x, W, 0)] * W if input_split_sizes is None else list(input_split_sizes)
    received = [_part(x, W, 0)] * W if output_split_sizes is None else list(output_split_sizes)
    if len(sent) != W or len(received) != W or min(sent + received) < 0 or sum(sent) != x.shape[0]:
        raise ShapeError(
            f"split sizes must be {W} non-negative counts each, and input_split_sizes must sum to {x.shape[0]} rows; "
            f"got input_split_sizes={sent} and output_split_sizes={received}"
        )
    return sent, received


class _Send(torch.autograd.Function):
    """Starts an all-to-all in forward; in backward waits for the one that ``_Receive`` started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingAllToAll) -> Tensor:
        ctx.pending = pending
        pending.buffer = pending.start(x, pending.sent, pending.received)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.pending.wait()
        return dx, None


class _Receive(torch.autograd.Function):
    """Waits in forward; in backward sends the gradient, to which no other term has to be added."""

    @staticmethod
    def forward(ctx: Any, rows_sent: Tensor, pending: PendingAllToAll) -> Tensor:
        ctx.pending = pending
        pending.wait()
        rows, pending.buffer = pending.buffer, None
        assert rows is not None, "the exchange has not started, or has already ended"
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        pending = ctx.pending
        return pending.start(dy, pending.received, pending.sent), None


class _Movement(torch.autograd.Function):
    """Applies ``move`` over ``group`` in forward and its adjoint ``back`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, move: _Move, back: _Move) -> Tensor:
        ctx.group, ctx.move, ctx.back = group, move, back
        return move(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _Movement.apply(dy, ctx.group, ctx.back, ctx.move), None, None, None


def _moved(x: Tensor, group: ProcessGroup | None, move: _Move, back: _Move) -> Tensor:
    if group is None or group.size() == 1:
        return x
    y: Tensor = _Movement.apply(x, group, move, back)
    return y


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.contiguous()


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    n = _part(x, group.size(), dim)
    return x.narrow(dim, group.rank() * n, n).clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    W = group.size()
    _check_dims(x)
    y = x.new_empty(W * x.shape[0], *x.shape[1:])
    all_gather_into(y, x.contiguous(), group)
    return y if dim == 0 else torch.cat(y.chunk(W), dim=dim)


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    W = group.size()
    n = _part(x, W, dim)
    parts = x if dim == 0 else torch.cat(x.split(n, dim=dim))  # this rank's slice of dim, along dim 0
    y = x.new_empty(parts.shape[0] // W, *parts.shape[1:])
    reduce_scatter_into(y, parts.contiguous(), group)
    return y


def _all_to_all(x: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    y = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
    return y


def _part(x: Tensor, W: int, dim: int) -> int:
    """Returns the size of one of ``W`` equal parts of ``dim``."""
    _check_dims(x)
    if x.shape[dim] % W:
        raise ShapeError(
            f"dimension {dim} of {list(x.shape)} must be divisible by the {W} ranks of the group; "
            f"pad it to {-(-x.shape[dim] // W) * W}"
        )
    return x.shape[dim] // W


def _check_dims(x: Tensor) -> None:
    if x.dim() == 0:
        raise ShapeError("the tensor must have a dimension to split or gather; got a scalar; add one: x[None]")
