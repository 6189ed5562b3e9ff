"""Dispatch and combine through torch's symmetric memory, by counts that stay on the device.

    dispatch   rows [N, D] sorted by all E experts, with a weight each  ->  [R, D] sorted by this rank's E/ep experts
    combine    [R, D]  ->  [N, D], in the order in which the rows were sent

Each is the gradient of the other. Peers read what a rank has put into a buffer that all of them allocated alike. The
kernels, ``all_to_all_vdev_2d`` and ``all_to_all_vdev_2d_offset`` of torch.ops.symm_mem, do not keep a rank from writing
to a buffer that others still read, and need NVSHMEM. All layers of a model share one pair of buffers, which has room
for the worst case, so nothing that autograd keeps may lie in them: rows are copied in and out.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megalith.errors import ConfigError, MissingDependencyError, ShapeError
from megalith.observe.units import quantity
from megalith.topology.agreement import agreed
from megalith.torch_compat import symmetric_memory

__all__ = [
    "Departure",
    "ExchangeSizes",
    "SymmetricA2A",
    "SymmetricMemory",
    "Way",
    "begin_symmetric_dispatch",
    "end_symmetric_dispatch",
    "nvshmem_memory",
    "symmetric_combine",
]

_PIECE = 16  # bytes that a kernel copies at a time


class SymmetricMemory(Protocol):
    """What is called of torch's symmetric memory, over the ranks of one group; all of them make the same calls.

    ``splits`` are numbers of rows, ``offsets`` the rows where they begin, int64; W ranks, E experts.
    """

    def size(self) -> int:
        """W."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for other ranks to read, allocated by all ranks of the world.

        Raises torch.OutOfMemoryError where there is not enough, once all ranks have come here.
        """

    def rendezvous(self, tensor: Tensor) -> None:
        """Lets the other ranks read ``tensor``, which is of ``empty``; all ranks of the group wait for each other."""

    def barrier(self) -> None:
        """What is called later on the device waits until all ranks have come here, and written what they wrote."""

    def all_to_all_vdev_2d(self, x: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        """Rows of each expert, without gaps, ``splits`` [E] -> those of each expert of this rank, from each rank.

        ``out_splits_offsets`` [2, E] are written; the block of an expert without rows is one row long.
        """

    def all_to_all_vdev_2d_offset(
        self, x: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        """The way back: of each expert of this rank, to each rank, [2, E] -> sorted by all experts, without gaps."""


@dataclass(frozen=True, eq=False)
class Departure:
    """What ``begin_symmetric_dispatch`` has sent: rows [N, D], weights [N], and int64 [E], how many of each expert.

    Attributes:
        arrived: int64 [2, E], how many rows of each expert of this rank, from each rank, and where they begin.
        number: of the exchange.
    """

    rows: Tensor
    weights: Tensor
    splits: Tensor
    arrived: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Way:
    """How the rows of one dispatch travelled, for the way back and for gradients.

    Attributes:
        splits: int64 [E], rows sent to each expert; ``num_sent`` together.
        arrived: int64 [2, E]: rows of each expert of this rank, from each rank, and where they begin in [R, D].
        places: int64 [R]: where they arrive in the buffer.
        rows_per_expert: int32 [E/ep], of this rank.
    """

    splits: Tensor
    num_sent: int
    arrived: Tensor
    places: Tensor
    rows_per_expert: Tensor


@dataclass(frozen=True)
class ExchangeSizes:
    """What the buffers of a ``SymmetricA2A`` must have room for.

    Attributes:
        num_ranks: W, that exchange rows.
        num_experts: E, on all ranks.
        top_k: K, the different experts of a token.
        max_tokens: that a rank sends at a time.
        size: D, the features of a row.
        dtype: of rows; their weights are kept in float32 or wider.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    max_tokens: int
    size: int
    dtype: torch.dtype

    @property
    def sent(self) -> tuple[int, int]:
        """The shape of the buffer that rows leave from, each with its weight."""
        return self.max_tokens * self.top_k, self._width

    @property
    def received(self) -> tuple[int, int]:
        """The shape of the buffer that rows arrive in."""
        num_local_experts = self.num_experts // self.num_ranks
        # every token of all ranks, to as many experts as it can have here, and a row of each expert without rows
        most = self.num_ranks * self.max_tokens * min(self.top_k, num_local_experts) + num_local_experts
        return most, self._width

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the int64 counts of rows: those sent, those received, and the same on the way back."""
        E = self.num_experts
        return (E,), (2, E), (2, E), (2, E)

    @property
    def num_bytes(self) -> int:
        """All that ``SymmetricA2A`` allocates on a rank."""
        rows = prod(self.sent) + prod(self.received)
        return rows * self.dtype.itemsize + sum(map(prod, self.counts)) * torch.int64.itemsize

    @property
    def _width(self) -> int:
        """Elements of a row, whose weight has a piece of its own at the end."""
        per_piece = _PIECE // self.dtype.itemsize
        return (ceil(self.size / per_piece) + 1) * per_piece


class SymmetricA2A:
    """The buffers that rows travel through. All ranks of the world build it, at the same point of their program.

    Args:
        memory: of the ranks that exchange rows.
        sizes: what there is room for.

    Raises:
        ConfigError: on every rank; there is not enough memory on one of them.
    """

    def __init__(self, memory: SymmetricMemory, sizes: ExchangeSizes) -> None:
        assert memory.size() == sizes.num_ranks, f"{sizes} is of another group"
        self.memory, self.num_exchanges = memory, 0
        rows = [_allocated(memory, shape, sizes.dtype, sizes) for shape in (sizes.sent, sizes.received)]
        splits = [_allocated(memory, shape, torch.int64, sizes) for shape in sizes.counts]
        for tensor in (*rows, *splits):
            memory.rendezvous(tensor)
        self.sent, self.received = (_Buffer(tensor, sizes.size) for tensor in rows)
        self.sent_splits, self.received_splits, self.returning_splits, self.returned_splits = splits
        self.last_read: _Buffer | None = None
        # the first exchange of a group makes an NVSHMEM team, which all ranks of the world must do, and ranks of a
        # stage without experts would never exchange anything
        nothing = self.sent.rows[:0]
        arrived = self.carry(nothing, None, torch.zeros_like(self.sent_splits))
        self.carry_back(nothing, None, arrived)

    def carry(self, rows: Tensor, weights: Tensor | None, splits: Tensor) -> Tensor:
        """Dispatches rows into ``received``; returns the counts and offsets [2, E] of what has arrived there."""
        self._let_read(self.sent)
        self.sent.put(rows, weights)
        self.sent_splits.copy_(splits)
        self.memory.barrier()  # peers read what is complete
        self.memory.all_to_all_vdev_2d(self.sent.whole, self.received.whole, self.sent_splits, self.received_splits)
        return self.received_splits.clone()

    def carry_back(self, rows: Tensor, weights: Tensor | None, arrived: Tensor) -> None:
        """Sends rows [R, D] and their weights back, into ``sent``; ``arrived`` [2, E] as in ``Way``."""
        self._let_read(self.received)
        self.received.put(rows, weights)
        self.returning_splits.copy_(arrived)
        self.memory.barrier()
        self.memory.all_to_all_vdev_2d_offset(
            self.received.whole, self.sent.whole, self.returning_splits, self.returned_splits
        )

    def _let_read(self, buffer: "_Buffer") -> None:
        """Waits until peers have read ``buffer``, if the last exchange was from there; else its barrier was later."""
        if self.last_read is buffer:
            self.memory.barrier()
        self.last_read = buffer
        self.num_exchanges += 1


def begin_symmetric_dispatch(a2a: SymmetricA2A, rows: Tensor, weights: Tensor, rows_per_expert: Tensor) -> Departure:
    """Sends rows [N, D], sorted by expert, and their weights [N] without waiting for them on the host.

    ``rows_per_expert`` [E]: rows past those of the last expert are not sent. Until ``end_symmetric_dispatch`` nothing
    else may travel.

    Raises:
        ShapeError: there is no room for as many rows, or they have another dtype than the buffer.
    """
    with torch.no_grad():
        splits = rows_per_expert.to(torch.int64)
        arrived = a2a.carry(rows, weights, splits)
    return Departure(rows, weights, splits, arrived, a2a.num_exchanges)


def end_symmetric_dispatch(a2a: SymmetricA2A, left: Departure) -> tuple[Tensor, Tensor, Way]:
    """Rows [R, D] sorted by this rank's experts, their weights [R], and the way that they came.

    The host waits for the device here, to know R: without that the experts would compute as many rows as the worst
    case has, ep times those of even loads and more.

    Raises:
        RuntimeError: another batch has left since.
    """
    if left.number != a2a.num_exchanges:
        raise RuntimeError(
            "another batch has left through symmetric memory since, and has overwritten the rows of this one; receive "
            "each batch before the next is sent, or use parallel.dispatch.method=all_to_all"
        )
    counts, offsets = left.arrived
    num_sent, R = torch.stack((left.splits.sum(), counts.sum())).tolist()
    begins = counts.cumsum(0) - counts  # without the gaps that the buffer has
    places = torch.arange(R, device=counts.device) + (offsets - begins).repeat_interleave(counts, output_size=R)
    rows_per_expert = counts.view(-1, a2a.memory.size()).sum(1).to(torch.int32)
    way = Way(left.splits, num_sent, torch.stack((counts, begins)), places, rows_per_expert)
    rows, weights = _Dispatch.apply(left.rows, left.weights, a2a, way)
    return rows, weights, way


def symmetric_combine(a2a: SymmetricA2A, rows: Tensor, way: Way) -> Tensor:
    """What was made of the rows that came by ``way``, [R, D], in the order in which they were sent, [num_sent, D]."""
    y: Tensor = _Combine.apply(rows, a2a, way)
    return y


def nvshmem_memory(group: ProcessGroup, device: torch.device) -> SymmetricMemory:
    """torch's symmetric memory over ``group``, by NVSHMEM.

    Raises:
        ConfigError: ``device`` is no GPU.
        MissingDependencyError: NVSHMEM cannot be loaded, or torch was built without it.
    """
    if device.type != "cuda":
        raise ConfigError(
            "parallel.dispatch.method=symmetric exchanges through the memory of GPUs, and this run is on "
            f"{device.type}; use parallel.dispatch.method=all_to_all"
        )
    if not symmetric_memory.is_nvshmem_available():
        raise MissingDependencyError(
            "parallel.dispatch.method=symmetric needs NVSHMEM, which this torch was built without or cannot load; "
            "run: pip install nvidia-nvshmem-cu12 (or -cu13, as torch's CUDA), or use "
            "parallel.dispatch.method=all_to_all"
        )
    symmetric_memory.set_backend("NVSHMEM")
    return _Nvshmem(group, device)


def _allocated(memory: SymmetricMemory, shape: tuple[int, ...], dtype: torch.dtype, sizes: ExchangeSizes) -> Tensor:
    """One of the buffers; ConfigError on every rank unless all of them have it."""
    found: Tensor | torch.OutOfMemoryError
    # any other error is raised at once: peers may wait in the allocation, and would never come to the agreement
    try:
        found = memory.empty(shape, dtype)
    except torch.OutOfMemoryError as error:
        found = error
    with agreed():
        if isinstance(found, torch.OutOfMemoryError):
            raise ConfigError(
                f"parallel.dispatch.method=symmetric cannot have its buffers of {quantity(sizes.num_bytes)}B: {found}; "
                "use a smaller train.micro_batch_size, or parallel.dispatch.method=all_to_all"
            ) from found
        return found


class _Nvshmem:
    """``SymmetricMemory`` of torch."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.ticket = torch.zeros(1, device=device)

    def size(self) -> int:
        return self.group.size()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            tensor: Tensor = symmetric_memory.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            # torch says it in a RuntimeError like any other
            if "nvshmem_malloc failed" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return tensor

    def rendezvous(self, tensor: Tensor) -> None:
        symmetric_memory.rendezvous(tensor, self.group)

    def barrier(self) -> None:
        # the barrier of a tensor's handle does nothing under NVSHMEM up to torch 2.13
        # (github.com/pytorch/pytorch/issues/191858); a sum is complete on no rank before the streams of all came to it
        dist.all_reduce(self.ticket, group=self.group)

    def all_to_all_vdev_2d(self, x: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d(x, out, splits, out_splits_offsets, self.group.group_name)

    def all_to_all_vdev_2d_offset(
        self, x: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(x, out, splits_offsets, out_splits_offsets, self.group.group_name)


class _Buffer:
    """Rows and a weight each, in symmetric memory.

    A weight is in the last piece of its row, so that both travel at once: kernels of two dispatches would overwrite
    each other's counts without a barrier between them.
    """

    def __init__(self, whole: Tensor, size: int) -> None:
        per_piece, wide = _PIECE // whole.dtype.itemsize, torch.promote_types(whole.dtype, torch.float32)
        self.whole = whole
        self.rows = self.whole[:, :size]
        self.weights = self.whole[:, -per_piece:].view(wide)[:, 0]

    def put(self, rows: Tensor, weights: Tensor | None) -> None:
        """Fills its first rows."""
        room = self.rows
        if len(rows) > len(room) or rows.dtype != room.dtype:
            raise ShapeError(
                f"parallel.dispatch.method=symmetric has room for {len(room)} rows of {room.dtype}, those of a "
                f"micro-batch of the run's settings; got {len(rows)} of {rows.dtype}; use fewer tokens at a time, or "
                "parallel.dispatch.method=all_to_all"
            )
        room[: len(rows)].copy_(rows)
        if weights is not None:
            self.weights[: len(rows)].copy_(weights)


class _Dispatch(torch.autograd.Function):
    """Copies what has arrived out of the buffer; ``rows`` and ``weights``, which were sent, get its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, a2a: SymmetricA2A, way: Way) -> tuple[Tensor, Tensor]:
        ctx.a2a, ctx.way, ctx.num_rows = a2a, way, len(rows)
        return a2a.received.rows[way.places], a2a.received.weights[way.places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dweights: Tensor) -> tuple[Tensor | None, ...]:
        buffer, N = ctx.a2a.sent, ctx.way.num_sent
        ctx.a2a.carry_back(drows, dweights, ctx.way.arrived)
        # rows that were not sent have none
        dx, dw = drows.new_zeros(ctx.num_rows, drows.shape[1]), dweights.new_zeros(ctx.num_rows)
        dx[:N], dw[:N] = buffer.rows[:N], buffer.weights[:N]
        return dx, dw, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, a2a: SymmetricA2A, way: Way) -> Tensor:
        ctx.a2a, ctx.way = a2a, way
        a2a.carry_back(rows, None, way.arrived)
        return a2a.sent.rows[: way.num_sent].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.a2a.carry(dy, None, ctx.way.splits)
        return ctx.a2a.received.rows[ctx.way.places], None, None
