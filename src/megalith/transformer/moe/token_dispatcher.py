"""How tokens reach the ranks that hold their experts, and how what experts give comes back.

all_to_all   each row goes to the rank of its expert; with etp, where ranks hold parts of the same experts and have
             different tokens, rows are then gathered over etp. Back by the same ways, summed over etp
all_gather   every rank of ep and etp receives all tokens and computes the rows of its experts; their sums are scattered
flex         each token once to every rank of ep that holds one of its experts, and sums back, by fused kernels
symmetric    each row to the rank of its expert, through symmetric memory, where it arrives sorted

Between, rows are sorted by expert. What a call needs later is in frozen records that it is given back, so that several
batches may be on their way at once, save that of symmetric each must be received before the next is sent. Weights of
rows travel with them: experts apply them.
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
    Travelling,
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
    """What this rank's experts compute: rows [R, D] sorted by expert, their weights [R], and int32 [E/ep]."""

    rows: Tensor
    weights: Tensor
    rows_per_expert: Tensor


class MoETokenDispatcher(ABC, Generic[Sent, Plan]):
    """Sends tokens to experts, over ep and etp.

    Args:
        num_experts: of the layer, on all ranks.
        options: this rank's groups, and the exchange that the method takes.
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
        """Begins to send tokens [T, D] to their experts; what is called before ``receive`` runs meanwhile.

        ``capacity``: every expert gets so many rows from each rank, zeros among them, and none has more.
        """

    @abstractmethod
    def receive(self, sent: Sent) -> tuple[ExpertRows, Plan]:
        """The rows of this rank's experts, and how they go back."""

    @abstractmethod
    def combine(self, rows: Tensor, plan: Plan) -> Tensor:
        """What experts gave for their rows, [R, D] -> [T, D], summed for each token, over etp too."""


@dataclass(frozen=True, eq=False)
class _Everything:
    """All tokens [T*ep*etp, D], and the experts and weights of each."""

    tokens: Tensor
    indices: Tensor
    weights: Tensor


class MoEAllGatherTokenDispatcher(MoETokenDispatcher[_Everything, RowMap]):
    """All tokens to all ranks: what travels does not grow with K. Every rank must have the same number of tokens."""

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> _Everything:
        """Gathers everything; it is there when this returns."""
        assert capacity is None, "config refuses capacities that are padded to"
        return _Everything(*(self._gather(x) for x in (tokens, routing.indices, routing.weights)))

    def receive(self, sent: _Everything) -> tuple[ExpertRows, RowMap]:
        here = sent.indices - self.ep_rank * self.num_local_experts  # experts elsewhere are skipped
        rows, weights, found = permute(sent.tokens, here, sent.weights, num_experts=self.num_local_experts)
        assert weights is not None, "weights were given"
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
    """How many rows go where.

    Attributes:
        sent, received: to and from each rank of ep.
        gathered: from each rank of etp.
        arriving: int32 [etp, ep, E/ep]: of each of this rank's experts, from each rank.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    arriving: Tensor


@dataclass(frozen=True, eq=False)
class _OnTheirWay:
    """Rows and their weights; ``sorted_here``: where they were, sorted by all experts."""

    rows: Travelling
    weights: Travelling
    sorted_here: RowMap
    counts: _Counts


@dataclass(frozen=True, eq=False)
class _WayBack:
    """Where rows are, sorted by this rank's experts, and the way that they came; None: they have not travelled."""

    sorted_there: RowMap
    came: _OnTheirWay | None = None


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher[_OnTheirWay, _WayBack]):
    """Each row to the rank of its expert. The host waits for the device once, to know how many rows arrive.

    With a ``capacity`` all numbers are known, and it does not wait.
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
        assert weights is not None, "weights were given"
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
        # blocks of [etp, ep, E/ep], each of one expert, are sorted by expert
        blocks = torch.arange(self.num_local_experts, device=rows.device).repeat(self.etp_size * self.ep_size)
        expert = blocks.repeat_interleave(sent.counts.arriving.flatten(), output_size=len(rows))
        found = row_map(expert.unsqueeze(1), len(rows), num_experts=self.num_local_experts)
        rows, sorted_weights = permute_by(rows, found, weights.unsqueeze(1))
        assert sorted_weights is not None, "weights were given"
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
        sent, *received = torch.cat((sending.sum(1).unsqueeze(0), arriving.sum(2))).tolist()  # the host waits here
        return _Counts(sent, received[self.etp_rank], [sum(each) for each in received], arriving)

    def _to_all_of_etp(self, x: Tensor, gathered: list[int]) -> Tensor:
        """This rank's rows [R, ...] to all ranks of etp -> theirs, [sum of gathered, ...]."""
        if self.etp_group is None:
            return x
        copies = x.expand(self.etp_size, *x.shape).flatten(0, 1)
        return all_to_all(copies, self.etp_group, gathered, [len(x)] * self.etp_size)

    def _sum_over_etp(self, y: Tensor, gathered: list[int]) -> Tensor:
        """The adjoint: terms [sum of gathered, D] -> the sums of this rank's rows."""
        if self.etp_group is None:
            return y
        R = gathered[self.etp_rank]
        terms = all_to_all(y, self.etp_group, [R] * self.etp_size, gathered)
        return terms.view(self.etp_size, R, y.shape[1]).sum(0)


@dataclass(frozen=True, eq=False)
class _Merged:
    """The tokens that arrived, and where their rows are; None: nothing has travelled."""

    rows: RowMap
    received: Received | None


class MoEFlexTokenDispatcher(MoETokenDispatcher[Received, _Merged]):
    """Fused dispatch and combine, see ``parallel.expert.fused_a2a``. Raises ConfigError without such an exchange."""

    def __init__(self, num_experts: int, options: BuildOptions) -> None:
        super().__init__(num_experts, options)
        self.a2a = options.fused_a2a
        if self.a2a is None and self.ep_size > 1:
            raise ConfigError(
                "parallel.dispatch.method=flex needs BuildOptions(fused_a2a=...), an exchange over ep; give one, or "
                "use all_to_all"
            )

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> Received:
        assert capacity is None, "config refuses capacities that are padded to"
        experts = routing.indices.where(routing.indices < self.num_experts, -1)
        if self.a2a is None:
            return Received(tokens, experts, routing.weights)
        return fused_dispatch(self.a2a, tokens, experts, routing.weights, self.num_experts)

    def receive(self, sent: Received) -> tuple[ExpertRows, _Merged]:
        num_rows = None if self.a2a is None else sum(sent.tokens_per_expert)
        rows, weights, found = permute(
            sent.tokens, sent.experts, sent.weights, num_rows, num_experts=self.num_local_experts
        )
        assert weights is not None, "weights were given"
        return ExpertRows(rows, weights, found.rows_per_expert), _Merged(found, None if self.a2a is None else sent)

    def combine(self, rows: Tensor, plan: _Merged) -> Tensor:
        y = unpermute(rows, plan.rows)
        if self.a2a is None or plan.received is None:
            return y
        return fused_combine(self.a2a, y, plan.received)


@dataclass(frozen=True, eq=False)
class _Departed:
    """Where rows are, sorted by all experts; and what has left, or what need not travel."""

    sorted_here: RowMap
    rows: Departure | ExpertRows


@dataclass(frozen=True, eq=False)
class _Return:
    """Where rows go back to, and how; None: they have not travelled."""

    sorted_here: RowMap
    way: Way | None


class MoESymmetricTokenDispatcher(MoETokenDispatcher[_Departed, _Return]):
    """Through symmetric memory, see ``parallel.expert.symmetric_a2a``. Raises ConfigError without such an exchange.

    The host waits for the device in ``receive``, so that what is called before it is queued already.
    """

    def __init__(self, num_experts: int, options: BuildOptions) -> None:
        super().__init__(num_experts, options)
        self.a2a = options.symmetric_a2a
        if self.a2a is None and self.ep_size > 1:
            raise ConfigError(
                "parallel.dispatch.method=symmetric needs BuildOptions(symmetric_a2a=...), an exchange over ep; give "
                "one, or use all_to_all"
            )

    def send(self, tokens: Tensor, routing: Routing, capacity: int | None = None) -> _Departed:
        assert capacity is None, "config refuses capacities that are padded to"
        found = row_map(routing.indices, routing.indices.numel(), num_experts=self.num_experts)
        rows, weights = permute_by(tokens, found, routing.weights)
        assert weights is not None, "weights were given"
        if self.a2a is None:
            return _Departed(found, ExpertRows(rows, weights, found.rows_per_expert))
        # a compiler cannot follow writes into the shared buffers: not traced, here and below
        begin = torch.compiler.disable(begin_symmetric_dispatch)
        return _Departed(found, begin(self.a2a, rows, weights, found.rows_per_expert))

    def receive(self, sent: _Departed) -> tuple[ExpertRows, _Return]:
        if isinstance(sent.rows, ExpertRows):
            return sent.rows, _Return(sent.sorted_here, None)
        assert self.a2a is not None, "rows have left through it"
        rows, weights, way = torch.compiler.disable(end_symmetric_dispatch)(self.a2a, sent.rows)
        found = sent.sorted_here.up_to(way.num_sent)  # some may be dropped
        return ExpertRows(rows, weights, way.rows_per_expert), _Return(found, way)

    def combine(self, rows: Tensor, plan: _Return) -> Tensor:
        if self.a2a is not None and plan.way is not None:
            rows = torch.compiler.disable(symmetric_combine)(self.a2a, rows, plan.way)
        return unpermute(rows, plan.sorted_here)
