"""Dispatch and combine through torch's symmetric memory, with row counts that stay on the device.

    dispatch   rows [N, D] sorted by all E experts, with a weight each  ->  [R, D] sorted by this rank's E/ep experts
    combine    [R, D]  ->  [N, D], in the order in which the rows were sent

Each is the gradient of the other. A rank writes its rows to a buffer that all ranks have allocated with the same size,
and its peers read them. The kernels, ``all_to_all_vdev_2d`` and ``all_to_all_vdev_2d_offset`` of torch.ops.symm_mem,
need NVSHMEM, and do not stop a rank from overwriting a buffer that others are still reading. All layers of a model
share one pair of buffers, sized for the worst case. Autograd must not save views of them, so rows are copied in and
out.
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
from megalith.torch_compat.distributed import symmetric_memory

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

_PIECE = 16  # bytes that the kernels copy at a time


class SymmetricMemory(Protocol):
    """The operations of torch's symmetric memory that are used here; all ranks of the group make the same calls.

    ``splits`` are numbers of rows and ``offsets`` the indices of their first rows, int64; W ranks, E experts.
    """

    def size(self) -> int:
        """Returns W."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates memory that other ranks can read; a collective over all ranks of the world.

        Raises torch.OutOfMemoryError if there is not enough, after all ranks have entered the call.
        """

    def rendezvous(self, tensor: Tensor) -> None:
        """Lets the other ranks read ``tensor``, made by ``empty``; all ranks of the group wait for each other."""

    def barrier(self) -> None:
        """Makes later work on the device wait until all ranks have arrived here and their writes are complete."""

    def all_to_all_vdev_2d(self, x: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        """Sends contiguous rows sorted by expert, ``splits`` [E]; receives those of this rank's experts, by rank.

        Writes ``out_splits_offsets`` [2, E]. An expert without rows still occupies one row of ``out``.
        """

    def all_to_all_vdev_2d_offset(
        self, x: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        """The inverse: sends rows of this rank's experts, [2, E], back; receives rows sorted by expert, contiguous."""


@dataclass(frozen=True, eq=False)
class Departure:
    """What ``begin_symmetric_dispatch`` has sent: rows [N, D], weights [N], and rows per expert, int64 [E].

    Attributes:
        arrived: int64 [2, E], the number of rows for each expert of this rank from each rank, and their offsets.
        number: of the exchange.
    """

    rows: Tensor
    weights: Tensor
    splits: Tensor
    arrived: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Way:
    """The routes of the rows of one dispatch, for combine and for gradients.

    Attributes:
        splits: int64 [E], rows sent to each expert.
        num_sent: their sum.
        arrived: int64 [2, E], rows for each expert of this rank from each rank, and their offsets in [R, D].
        places: int64 [R], the indices of the received rows in the buffer.
        rows_per_expert: int32 [E/ep], of this rank's experts.
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
        num_ranks: W, the ranks that exchange rows.
        num_experts: E, on all ranks together.
        top_k: K, the number of distinct experts per token.
        max_tokens: the most tokens that a rank sends at a time.
        size: D, the features per row.
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
        """The shape of the send buffer, whose rows include their weights."""
        return self.max_tokens * self.top_k, self._width

    @property
    def received(self) -> tuple[int, int]:
        """The shape of the receive buffer."""
        num_local_experts = self.num_experts // self.num_ranks
        # all tokens of all ranks, each to as many experts as it can have here, plus one row per expert without rows
        most = self.num_ranks * self.max_tokens * min(self.top_k, num_local_experts) + num_local_experts
        return most, self._width

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the int64 row counts: sent, received, and the same for the return trip."""
        E = self.num_experts
        return (E,), (2, E), (2, E), (2, E)

    @property
    def num_bytes(self) -> int:
        """The total that ``SymmetricA2A`` allocates on a rank."""
        rows = prod(self.sent) + prod(self.received)
        return rows * self.dtype.itemsize + sum(map(prod, self.counts)) * torch.int64.itemsize

    @property
    def _width(self) -> int:
        """The number of elements per row, with a separate 16-byte piece for the weight at the end."""
        per_piece = _PIECE // self.dtype.itemsize
        return (ceil(self.size / per_piece) + 1) * per_piece


class SymmetricA2A:
    """The buffers of the exchange. All ranks of the world must construct it at the same point of the program.

    Args:
        memory: symmetric memory of the ranks that exchange rows.
        sizes: what the buffers must have room for.

    Raises:
        ConfigError: on every rank, if there is not enough memory on any of them.
    """

    def __init__(self, memory: SymmetricMemory, sizes: ExchangeSizes) -> None:
        assert memory.size() == sizes.num_ranks, f"{sizes} is for a group of another size"
        self.memory, self.num_exchanges = memory, 0
        rows = [_allocated(memory, shape, sizes.dtype, sizes) for shape in (sizes.sent, sizes.received)]
        splits = [_allocated(memory, shape, torch.int64, sizes) for shape in sizes.counts]
        for tensor in (*rows, *splits):
            memory.rendezvous(tensor)
        self.sent, self.received = (_Buffer(tensor, sizes.size) for tensor in rows)
        self.sent_splits, self.received_splits, self.returning_splits, self.returned_splits = splits
        self.last_read: _Buffer | None = None
        # the first exchange of a group creates an NVSHMEM team, which needs all ranks of the world, but ranks of a
        # stage without experts would never take part in an exchange
        nothing = self.sent.rows[:0]
        arrived = self.carry(nothing, None, torch.zeros_like(self.sent_splits))
        self.carry_back(nothing, None, arrived)

    def carry(self, rows: Tensor, weights: Tensor | None, splits: Tensor) -> Tensor:
        """Dispatches rows into ``received``; returns the counts and offsets [2, E] of the rows that arrived there."""
        self._let_read(self.sent)
        self.sent.put(rows, weights)
        self.sent_splits.copy_(splits)
        self.memory.barrier()  # so that peers read complete data
        self.memory.all_to_all_vdev_2d(self.sent.whole, self.received.whole, self.sent_splits, self.received_splits)
        return self.received_splits.clone()

    def carry_back(self, rows: Tensor, weights: Tensor | None, arrived: Tensor) -> None:
        """Sends rows [R, D] and their weights back, into ``sent``; ``arrived`` is that of ``Way``."""
        self._let_read(self.received)
        self.received.put(rows, weights)
        self.returning_splits.copy_(arrived)
        self.memory.barrier()
        self.memory.all_to_all_vdev_2d_offset(
            self.received.whole, self.sent.whole, self.returning_splits, self.returned_splits
        )

    def _let_read(self, buffer: "_Buffer") -> None:
        """Waits until peers have read ``buffer``.

        If the last exchange used the other buffer, its barrier came after those reads, and no other is needed.
        """
        if self.last_read is buffer:
            self.memory.barrier()
        self.last_read = buffer
        self.num_exchanges += 1


def begin_symmetric_dispatch(a2a: SymmetricA2A, rows: Tensor, weights: Tensor, rows_per_expert: Tensor) -> Departure:
    """Sends rows [N, D], sorted by expert, and their weights [N] without host synchronization.

    Rows after the last expert's, as counted by ``rows_per_expert`` [E], are not sent. No other exchange may start
    before ``end_symmetric_dispatch``.

    Raises:
        ShapeError: more rows than the buffer has room for, or another dtype than the buffer's.
    """
    with torch.no_grad():
        splits = rows_per_expert.to(torch.int64)
        arrived = a2a.carry(rows, weights, splits)
    return Departure(rows, weights, splits, arrived, a2a.num_exchanges)


def end_symmetric_dispatch(a2a: SymmetricA2A, left: Departure) -> tuple[Tensor, Tensor, Way]:
    """Returns rows [R, D] sorted by this rank's experts, their weights [R], and their routes.

    The host synchronizes with the device here to learn R. Without that, experts would have to compute the worst-case
    number of rows, which is over min(ep, E / K) times that of even loads.

    Raises:
        RuntimeError: another exchange has started since.
    """
    if left.number != a2a.num_exchanges:
        raise RuntimeError(
            "another batch has since been sent through symmetric memory and has overwritten this one; receive each "
            "batch before sending the next, or use parallel.dispatch.method=all_to_all"
        )
    counts, offsets = left.arrived
    num_sent, R = torch.stack((left.splits.sum(), counts.sum())).tolist()
    begins = counts.cumsum(0) - counts  # offsets without the gaps of the buffer
    places = torch.arange(R, device=counts.device) + (offsets - begins).repeat_interleave(counts, output_size=R)
    rows_per_expert = counts.view(-1, a2a.memory.size()).sum(1).to(torch.int32)
    way = Way(left.splits, num_sent, torch.stack((counts, begins)), places, rows_per_expert)
    rows, weights = _Dispatch.apply(left.rows, left.weights, a2a, way)
    return rows, weights, way


def symmetric_combine(a2a: SymmetricA2A, rows: Tensor, way: Way) -> Tensor:
    """Returns ``rows`` [R, D] to the ranks of origin -> [num_sent, D], in the order in which they were sent."""
    y: Tensor = _Combine.apply(rows, a2a, way)
    return y


def nvshmem_memory(group: ProcessGroup, device: torch.device) -> SymmetricMemory:
    """Returns torch's symmetric memory over ``group``, with the NVSHMEM backend.

    Raises:
        ConfigError: ``device`` is not a GPU.
        MissingDependencyError: NVSHMEM cannot be loaded, or torch was built without it.
    """
    if device.type != "cuda":
        raise ConfigError(
            "parallel.dispatch.method=symmetric exchanges tokens through GPU memory, but this run is on "
            f"{device.type}; use parallel.dispatch.method=all_to_all"
        )
    if not symmetric_memory.is_nvshmem_available():
        raise MissingDependencyError(
            "parallel.dispatch.method=symmetric needs NVSHMEM, which this build of torch lacks or cannot load; "
            "run: pip install nvidia-nvshmem-cu12 (or -cu13, to match torch's CUDA), or use "
            "parallel.dispatch.method=all_to_all"
        )
    symmetric_memory.set_backend("NVSHMEM")
    return _Nvshmem(group, device)


def _allocated(memory: SymmetricMemory, shape: tuple[int, ...], dtype: torch.dtype, sizes: ExchangeSizes) -> Tensor:
    """Allocates one buffer; raises ConfigError on every rank unless all ranks have succeeded."""
    found: Tensor | torch.OutOfMemoryError
    # any other error is raised at once: peers may be blocked in the allocation, and would never reach ``agreed``
    try:
        found = memory.empty(shape, dtype)
    except torch.OutOfMemoryError as error:
        found = error
    with agreed():
        if isinstance(found, torch.OutOfMemoryError):
            raise ConfigError(
                f"parallel.dispatch.method=symmetric cannot allocate its buffers of {quantity(sizes.num_bytes)}B: "
                f"{found}; use a smaller train.micro_batch_size, or parallel.dispatch.method=all_to_all"
            ) from found
        return found


class _Nvshmem:
    """``SymmetricMemory`` with torch's NVSHMEM backend."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.ticket = torch.zeros(1, device=device)

    def size(self) -> int:
        return self.group.size()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            tensor: Tensor = symmetric_memory.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            # torch reports a failed allocation as a plain RuntimeError
            if "nvshmem_malloc failed" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return tensor

    def rendezvous(self, tensor: Tensor) -> None:
        symmetric_memory.rendezvous(tensor, self.group)

    def barrier(self) -> None:
        # the barrier of a tensor's handle does nothing under NVSHMEM up to torch 2.13
        # (github.com/pytorch/pytorch/issues/191858); an all-reduce completes only once all ranks' streams reach it
        dist.all_reduce(self.ticket, group=self.group)

    def all_to_all_vdev_2d(self, x: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d(x, out, splits, out_splits_offsets, self.group.group_name)

    def all_to_all_vdev_2d_offset(
        self, x: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(x, out, splits_offsets, out_splits_offsets, self.group.group_name)


class _Buffer:
    """Rows, each with a weight, in symmetric memory.

    A weight is stored in the last piece of its row so that both are sent by one kernel: two kernels without a barrier
    between them would overwrite each other's counts.
    """

    def __init__(self, whole: Tensor, size: int) -> None:
        per_piece, wide = _PIECE // whole.dtype.itemsize, torch.promote_types(whole.dtype, torch.float32)
        self.whole = whole
        self.rows = self.whole[:, :size]
        self.weights = self.whole[:, -per_piece:].view(wide)[:, 0]

    def put(self, rows: Tensor, weights: Tensor | None) -> None:
        """Copies ``rows`` and ``weights`` into the first rows of the buffer."""
        room = self.rows
        if len(rows) > len(room) or rows.dtype != room.dtype:
            raise ShapeError(
                f"parallel.dispatch.method=symmetric has room for {len(room)} rows of {room.dtype}, one "
                f"micro-batch of the run's settings; got {len(rows)} of {rows.dtype}; use fewer tokens at a time, or "
                "parallel.dispatch.method=all_to_all"
            )
        room[: len(rows)].copy_(rows)
        if weights is not None:
            self.weights[: len(rows)].copy_(weights)


class _Dispatch(torch.autograd.Function):
    """Copies the received rows out of the buffer; the gradients go to ``rows`` and ``weights``, which were sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, a2a: SymmetricA2A, way: Way) -> tuple[Tensor, Tensor]:
        ctx.a2a, ctx.way, ctx.num_rows = a2a, way, len(rows)
        return a2a.received.rows[way.places], a2a.received.weights[way.places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dweights: Tensor) -> tuple[Tensor | None, ...]:
        buffer, N = ctx.a2a.sent, ctx.way.num_sent
        ctx.a2a.carry_back(drows, dweights, ctx.way.arrived)
        # the gradient of rows that were not sent is zero
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
