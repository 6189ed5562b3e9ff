"""Dispatches tokens to the ranks that hold their experts, and combines the experts' outputs.

all_to_all   each row is sent to the rank of its expert. With etp, whose ranks hold parts of the same experts and
             different tokens, rows are then gathered over etp. Outputs are summed over etp and return the same way
all_gather   every rank of ep and etp receives all tokens and computes its experts' rows; sums are reduce-scattered
flex         fused kernels send each token once to every rank of ep that holds one of its experts, and return sums
symmetric    each row is sent to the rank of its expert through symmetric memory, and arrives sorted

Experts receive rows sorted by expert. State between calls is returned in frozen records, so several batches may be in
flight at once; with symmetric, each must be received before the next is sent. Routing weights are sent along with the
rows, and applied by the experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.fusions import permute, permute_by, unpermute
from megalith.fusions.experts.row_map import RowMap, row_map
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.expert.fused_a2a import Received, fused_combine, fused_dispatch
from megalith.parallel.expert.symmetric_a2a import (
    Departure,
    Way,
    begin_symmetric_dispatch,
    end_symmetric_dispatch,
    symmetric_combine,
)
from megalith.topology.collectives import (
    PendingAllToAll,
    all_to_all,
    begin_all_to_all,
    end_all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megalith.transformer.moe.capacity import fixed_row_map
from megalith.transformer.moe.routing import Routing

__all__ = [
    "ExpertRows",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
    "MoESymmetricTokenDispatcher",
    "MoETokenDispatcher",
]

Sent = TypeVar("Sent")
Plan = TypeVar("Plan")


class ExpertRows(NamedTuple):
    """The input of this rank's experts: rows [R, D] sorted by expert, their weights [R], and counts int32 [E/ep]."""

    rows: Tensor
    weights: Tensor
    rows_per_expert: Tensor


class MoETokenDispatcher(ABC, Generic[Sent, Plan]):
    """Sends tokens to experts, over ep and etp.

    Args:
        num_experts: of the layer, on all ranks together.
        options: this rank's groups, and the exchange that the method uses.
    """

    def __init__(self, num_experts: int, options: BuildOptions) -> None:
        pg_collection = options.pg_collection
        self.num_experts = num_experts
        self.ep_group, self.etp_group = pg_collection.ep, pg_collection.etp
        self.ep_size, self.etp_size = pg_collection.size("ep"), pg_collection.size("etp")
        self.ep_rank, self.etp_rank = pg_collection.rank("ep"), pg_collection.rank("etp")
        self.num_local_experts = num_experts // self.ep_size

    @abstractmethod
    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> Sent:
        """Starts sending tokens [T, D] to their experts; work before ``receive`` overlaps with the communication.

        ``capacity``: every expert gets exactly this many rows from each rank, padded with zeros; no expert has more.
        """

    @abstractmethod
    def receive(self, sent: Sent) -> tuple[ExpertRows, Plan]:
        """Returns the rows of this rank's experts, and the plan by which they are sent back."""

    @abstractmethod
    def combine(self, rows: Tensor, plan: Plan) -> Tensor:
        """Sends the experts' outputs [R, D] back and sums them per token, and over etp -> [T, D]."""


@dataclass(frozen=True, eq=False)
class _Everything:
    """All tokens [T*ep*etp, D], and the experts and weights of each."""

    tokens: Tensor
    indices: Tensor
    weights: Tensor


class MoEAllGatherTokenDispatcher(MoETokenDispatcher[_Everything, RowMap]):
    """All tokens to all ranks; traffic does not grow with K. Every rank must have the same number of tokens."""

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> _Everything:
        """Gathers everything synchronously."""
        assert capacity is None, "the config rejects padding to capacity"
        return _Everything(*(self._gather(x) for x in (tokens, routing.indices, routing.weights)))

    def receive(self, sent: _Everything) -> tuple[ExpertRows, RowMap]:
        here = sent.indices - self.ep_rank * self.num_local_experts  # experts on other ranks are skipped
        rows, weights, found = permute(sent.tokens, here, sent.weights, num_experts=self.num_local_experts)
        assert weights is not None, "weights were passed in"
        return ExpertRows(rows, weights, found.rows_per_expert), found

    def combine(self, rows: Tensor, plan: RowMap) -> Tensor:
        y = unpermute(rows, plan)
        for group in (self.etp_group, self.ep_group):
            y = reduce_scatter_to_sequence_parallel_region(y, group)
        return y

    def _gather(self, x: Tensor) -> Tensor:
        for group in (self.ep_group, self.etp_group):
            x = gather_from_sequence_parallel_region(x, group)
        return x


@dataclass(frozen=True, eq=False)
class _Counts:
    """Numbers of rows in an exchange.

    Attributes:
        sent, received: to and from each rank of ep.
        gathered: from each rank of etp.
        arriving: int32 [etp, ep, E/ep], for each of this rank's experts, from each rank.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    arriving: Tensor


@dataclass(frozen=True, eq=False)
class _OnTheirWay:
    """Rows and weights in flight; ``sorted_here`` maps tokens to rows sorted by all experts, on this rank."""

    rows: PendingAllToAll
    weights: PendingAllToAll
    sorted_here: RowMap
    counts: _Counts


@dataclass(frozen=True, eq=False)
class _WayBack:
    """The map of rows sorted by this rank's experts, and the exchange that they came by; None: no exchange."""

    sorted_there: RowMap
    came: _OnTheirWay | None = None


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher[_OnTheirWay, _WayBack]):
    """Sends each row to the rank of its expert.

    The host synchronizes with the device once, to learn how many rows arrive. With a ``capacity`` the numbers are
    known, and it does not.
    """

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> _OnTheirWay:
        if capacity is None:
            found = row_map(routing.indices, routing.indices.numel(), num_experts=self.num_experts)
        else:
            found = fixed_row_map(routing.indices, self.num_experts, capacity)
        counts = self._counts(found, capacity)
        if (num_rows := sum(counts.sent)) < len(found.token_of):  # some were dropped
            found = found.up_to(num_rows)
        rows, weights = permute_by(tokens, found, routing.weights)
        assert weights is not None, "weights were passed in"
        return _OnTheirWay(
            begin_all_to_all(rows, self.ep_group, counts.received, counts.sent),
            begin_all_to_all(weights, self.ep_group, counts.received, counts.sent),
            found,
            counts,
        )

    def receive(self, sent: _OnTheirWay) -> tuple[ExpertRows, _WayBack]:
        rows, weights = end_all_to_all(sent.rows), end_all_to_all(sent.weights)
        if self.ep_size * self.etp_size == 1:
            return ExpertRows(rows, weights, sent.sorted_here.rows_per_expert), _WayBack(sent.sorted_here)
        gathered = sent.counts.gathered
        rows, weights = (self._to_all_of_etp(x, gathered) for x in (rows, weights))
        # rows arrive in blocks [etp, ep, E/ep] of one expert each, and are sorted by expert
        blocks = torch.arange(self.num_local_experts, device=rows.device).repeat(self.etp_size * self.ep_size)
        expert = blocks.repeat_interleave(sent.counts.arriving.flatten(), output_size=len(rows))
        found = row_map(expert.unsqueeze(1), len(rows), num_experts=self.num_local_experts)
        rows, sorted_weights = permute_by(rows, found, weights.unsqueeze(1))
        assert sorted_weights is not None, "weights were passed in"
        return ExpertRows(rows, sorted_weights, found.rows_per_expert), _WayBack(found, sent)

    def combine(self, rows: Tensor, plan: _WayBack) -> Tensor:
        came = plan.came
        y = unpermute(rows, plan.sorted_there)
        if came is None:
            return y
        y = self._sum_over_etp(y, came.counts.gathered)
        y = all_to_all(y, self.ep_group, came.counts.sent, came.counts.received)
        return unpermute(y, came.sorted_here)

    def _counts(self, found: RowMap, capacity: int | None) -> _Counts:
        if capacity is not None:
            arriving = found.rows_per_expert[:1].expand(self.etp_size, self.ep_size, self.num_local_experts)
            even = [self.num_local_experts * capacity] * self.ep_size
            return _Counts(even, even, [sum(even)] * self.etp_size, arriving)
        if self.ep_size * self.etp_size == 1:
            num_rows = len(found.token_of)
            return _Counts([num_rows], [num_rows], [num_rows], found.rows_per_expert)
        sending = found.rows_per_expert.view(self.ep_size, -1)  # [ep, E/ep]
        arriving = all_to_all(sending, self.ep_group).unsqueeze(0)  # [1, ep, E/ep]
        arriving = gather_from_sequence_parallel_region(arriving, self.etp_group)  # [etp, ep, E/ep]
        sent, *received = torch.cat((sending.sum(1).unsqueeze(0), arriving.sum(2))).tolist()  # host synchronization
        return _Counts(sent, received[self.etp_rank], [sum(each) for each in received], arriving)

    def _to_all_of_etp(self, x: Tensor, gathered: list[int]) -> Tensor:
        """All-gathers rows [R, ...] over etp, with R different on each rank -> [sum of gathered, ...]."""
        if self.etp_group is None:
            return x
        copies = x.expand(self.etp_size, *x.shape).flatten(0, 1)
        return all_to_all(copies, self.etp_group, gathered, [len(x)] * self.etp_size)

    def _sum_over_etp(self, y: Tensor, gathered: list[int]) -> Tensor:
        """The adjoint: reduce-scatters partial sums [sum of gathered, D] -> this rank's rows [R, D]."""
        if self.etp_group is None:
            return y
        R = gathered[self.etp_rank]
        terms = all_to_all(y, self.etp_group, [R] * self.etp_size, gathered)
        return terms.view(self.etp_size, R, y.shape[1]).sum(0)


@dataclass(frozen=True, eq=False)
class _Merged:
    """The row map of the received tokens, and how they were received; None: no exchange."""

    rows: RowMap
    received: Received | None


class MoEFlexTokenDispatcher(MoETokenDispatcher[Received, _Merged]):
    """Fused dispatch and combine (``parallel.expert.fused_a2a``). Raises ConfigError if ep > 1 and none is given."""

    def __init__(self, num_experts: int, options: BuildOptions) -> None:
        super().__init__(num_experts, options)
        self.a2a = options.fused_a2a
        if self.a2a is None and self.ep_size > 1:
            raise ConfigError(
                "parallel.dispatch.method=flex needs BuildOptions(fused_a2a=...), an exchange over ep; pass one, or "
                "use all_to_all"
            )

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> Received:
        assert capacity is None, "the config rejects padding to capacity"
        experts = routing.indices.where(routing.indices < self.num_experts, -1)
        if self.a2a is None:
            return Received(tokens, experts, routing.weights)
        return fused_dispatch(self.a2a, tokens, experts, routing.weights, self.num_experts)

    def receive(self, sent: Received) -> tuple[ExpertRows, _Merged]:
        num_rows = None if self.a2a is None else sum(sent.tokens_per_expert)
        rows, weights, found = permute(
            sent.tokens, sent.experts, sent.weights, num_rows, num_experts=self.num_local_experts
        )
        assert weights is not None, "weights were passed in"
        return ExpertRows(rows, weights, found.rows_per_expert), _Merged(found, None if self.a2a is None else sent)

    def combine(self, rows: Tensor, plan: _Merged) -> Tensor:
        y = unpermute(rows, plan.rows)
        if self.a2a is None or plan.received is None:
            return y
        return fused_combine(self.a2a, y, plan.received)


@dataclass(frozen=True, eq=False)
class _Departed:
    """The map of rows sorted by all experts, and the exchange in progress, or the rows themselves without ep."""

    sorted_here: RowMap
    rows: Departure | ExpertRows


@dataclass(frozen=True, eq=False)
class _Return:
    """The map of rows sorted by all experts, and their routes; None: no exchange."""

    sorted_here: RowMap
    way: Way | None


class MoESymmetricTokenDispatcher(MoETokenDispatcher[_Departed, _Return]):
    """Exchange through symmetric memory (``parallel.expert.symmetric_a2a``).

    The host synchronizes with the device only in ``receive``, so work called before it is already queued by then.
    Raises ConfigError if ep > 1 and no exchange is given.
    """

    def __init__(self, num_experts: int, options: BuildOptions) -> None:
        super().__init__(num_experts, options)
        self.a2a = options.symmetric_a2a
        if self.a2a is None and self.ep_size > 1:
            raise ConfigError(
                "parallel.dispatch.method=symmetric needs BuildOptions(symmetric_a2a=...), an exchange over ep; pass "
                "one, or use all_to_all"
            )

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> _Departed:
        assert capacity is None, "the config rejects padding to capacity"
        found = row_map(routing.indices, routing.indices.numel(), num_experts=self.num_experts)
        rows, weights = permute_by(tokens, found, routing.weights)
        assert weights is not None, "weights were passed in"
        if self.a2a is None:
            return _Departed(found, ExpertRows(rows, weights, found.rows_per_expert))
        # not traced, here and below: the compiler cannot follow writes into the shared buffers
        begin = torch.compiler.disable(begin_symmetric_dispatch)
        return _Departed(found, begin(self.a2a, rows, weights, found.rows_per_expert))

    def receive(self, sent: _Departed) -> tuple[ExpertRows, _Return]:
        if isinstance(sent.rows, ExpertRows):
            return sent.rows, _Return(sent.sorted_here, None)
        assert self.a2a is not None, "rows were sent through it"
        rows, weights, way = torch.compiler.disable(end_symmetric_dispatch)(self.a2a, sent.rows)
        found = sent.sorted_here.up_to(way.num_sent)  # without dropped choices
        return ExpertRows(rows, weights, way.rows_per_expert), _Return(found, way)

    def combine(self, rows: Tensor, plan: _Return) -> Tensor:
        if self.a2a is not None and plan.way is not None:
            rows = torch.compiler.disable(symmetric_combine)(self.a2a, rows, plan.way)
        return unpermute(rows, plan.sorted_here)
