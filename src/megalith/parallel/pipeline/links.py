"""Messages between the stages of a pipeline: hidden states to the next stage, their gradients to the previous one.

Between two ranks there is a channel for each kind of message in each direction; messages arrive in the order in which
they are sent. NCCL matches messages by order alone, so the receiver takes that order from the sender's plan and posts
its receives in it, one message ahead of what it needs. NCCL also connects two ranks in their first send and receive,
which wait for each other. Every channel therefore transfers one element when it is opened, in an order common to all
ranks.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megalith.errors import ShapeError
from megalith.parallel.pipeline.dependencies import Result, destination, needs, receives, result_of
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Schedule
from megalith.topology.inbox import Inbox
from megalith.topology.rank_groups import ParallelState

__all__ = ["Deliveries", "Links", "Messages", "ShapeOf", "deliveries_to", "open_links"]

# index of a micro-batch -> shape of its hidden states
ShapeOf = Callable[[int], tuple[int, ...]]

# what is sent, and whether it goes to a higher rank of the pipeline
Channel = tuple[Literal["output", "input_gradient"], bool]


@dataclass(frozen=True)
class Links:
    """One rank's channels to the others of its pipeline.

    Attributes:
        rank: this rank's index in the pipeline.
        global_ranks: the global ranks of the pipeline, in pipeline order.
        groups: the process group of each channel, which contains all ranks of the pipeline.
        dtype, device: of hidden states and their gradients; None is torch's current default device.
    """

    rank: int = 0
    global_ranks: tuple[int, ...] = (0,)
    groups: Mapping[Channel, ProcessGroup] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


def open_links(placement: Placement, state: ParallelState, dtype: torch.dtype, device: torch.device) -> Links:
    """Returns this rank's links, already connected; a collective over the ranks of its pipeline.

    Their groups have the options of "pp", and are destroyed with ``state``.
    """
    rank, ranks = state.rank("pp"), tuple(state.ranks("pp"))
    edges = {(_channel(result, receiver), result.rank, receiver) for result, receiver in _messages(placement)}
    channels = {channel for channel, _, _ in edges}
    # NCCL has a communicator and a stream for every pair of ranks of a group that send to each other
    groups = {channel: state.another_group(ranks, "pp") for channel in sorted(channels)}
    first = torch.zeros(1, dtype=dtype, device=device)
    for channel, sender, receiver in sorted(edges):
        if rank == sender:
            dist.send(first, dst=ranks[receiver], group=groups[channel])
        elif rank == receiver:
            dist.recv(first, src=ranks[sender], group=groups[channel])
    return Links(rank, ranks, groups, dtype, device)


@dataclass(frozen=True)
class Deliveries:
    """What a rank knows about a schedule's messages before any is sent.

    Attributes:
        expected: the messages that it receives, by sender and kind, in the order in which they are sent.
        used_before: for each received message, the messages of this rank that the sender has consumed by then, and
            whose memory can be freed.
    """

    expected: Mapping[tuple[int, str], Sequence[Result]]
    used_before: Mapping[Result, Sequence[Result]]


@functools.lru_cache(maxsize=16)  # consecutive steps mostly have the same schedule
def deliveries_to(schedule: Schedule, rank: int) -> Deliveries:
    """Returns the messages of ``schedule`` to ``rank``."""
    expected: dict[tuple[int, str], list[Result]] = defaultdict(list)
    used_before: dict[Result, list[Result]] = {}
    for sender, results in receives(schedule, rank).items():
        for result in results:
            expected[sender, result.kind].append(result)
        to_rank, used = set(results), list[Result]()
        for action in schedule.plans[sender]:
            used += [need for need in needs(schedule.placement, sender, action) if need.rank == rank]
            given = result_of(sender, action)
            if given is not None and given in to_rank:
                used_before[given], used = used, []
    return Deliveries(expected, used_before)


class Messages:
    """The messages that this rank receives and sends in one run of ``schedule``."""

    def __init__(self, links: Links, schedule: Schedule, shape_of: ShapeOf) -> None:
        self._links = links
        self._placement = schedule.placement
        self._shape_of = shape_of
        deliveries = deliveries_to(schedule, links.rank)
        self._used_before = deliveries.used_before
        self._expected = {channel: deque(results) for channel, results in deliveries.expected.items()}
        self._posted: dict[Result, tuple[Inbox, Work]] = {}
        self._sent: dict[Result, tuple[Tensor, Work]] = {}
        self._here: dict[Result, Tensor] = {}  # from one chunk of this rank to another
        self._to_send = _messages_from(schedule, links.rank)
        for queue in self._expected.values():
            self._post(queue)

    def input_of(self, micro_batch: int, chunk: int) -> Tensor | None:
        """Returns the hidden states from the previous stage; None in the first stage."""
        before = self._placement.previous(self._links.rank, chunk)
        return None if before is None else self._take(Result("output", micro_batch, *before))

    def gradient_of(self, micro_batch: int, chunk: int) -> Tensor | None:
        """Returns the gradient of this stage's output; None in the last stage."""
        after = self._placement.next(self._links.rank, chunk)
        return None if after is None else self._take(Result("input_gradient", micro_batch, *after))

    def send_output(self, micro_batch: int, chunk: int, output: Tensor) -> None:
        """Sends hidden states to the next stage."""
        after = self._placement.next(self._links.rank, chunk)
        assert after is not None, "the last stage has no next stage"
        self._give(Result("output", micro_batch, self._links.rank, chunk), after[0], output)

    def send_gradient(self, micro_batch: int, chunk: int, gradient: Tensor) -> None:
        """Sends the gradient of this stage's input to the previous stage."""
        before = self._placement.previous(self._links.rank, chunk)
        assert before is not None, "the first stage has no previous stage"
        self._give(Result("input_gradient", micro_batch, self._links.rank, chunk), before[0], gradient)

    def finish(self) -> None:
        """Waits for all sends to complete, and frees their memory."""
        self._release(list(self._sent))

    def _take(self, result: Result) -> Tensor:
        if result.rank == self._links.rank:
            return self._here.pop(result)
        queue = self._expected[result.rank, result.kind]
        while result not in self._posted:
            self._post(queue)
        inbox, work = self._posted.pop(result)
        work.wait()
        self._release(self._used_before[result])
        if queue and not any((posted.rank, posted.kind) == (result.rank, result.kind) for posted in self._posted):
            self._post(queue)
        return inbox.opened()

    def _post(self, queue: deque[Result]) -> None:
        """Posts the receive of the next message of a channel from one rank."""
        links, result = self._links, queue.popleft()
        shape = self._shape_of(result.micro_batch)
        inbox = Inbox.of(torch.empty(shape, dtype=links.dtype, device=links.device))
        group = links.groups[_channel(result, links.rank)]
        work = dist.irecv(inbox.landing, src=links.global_ranks[result.rank], group=group)
        assert work is not None, "this rank is in the group of its own channel"
        self._posted[result] = inbox, work

    def _give(self, result: Result, receiver: int, tensor: Tensor) -> None:
        links, tensor = self._links, tensor.detach()
        self._check(result, tensor)
        if receiver == links.rank:
            self._here[result] = tensor
            return
        expected = next(self._to_send)
        # messages carry no id: in another order, they would be mistaken for each other where their shapes agree
        assert result == expected, f"the plan sends {expected} next, and the receiver expects it; got {result}"
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=links.global_ranks[receiver], group=links.groups[_channel(result, receiver)])
        assert work is not None, "this rank is in the group of its own channel"
        self._sent[result] = tensor, work

    def _release(self, results: Sequence[Result]) -> None:
        """Frees the memory of sent messages, after waiting for those that are still in flight."""
        for result in results:
            self._sent.pop(result)[1].wait()

    def _check(self, result: Result, tensor: Tensor) -> None:
        """Raises ShapeError unless ``tensor`` has the shape and dtype that the receiver has allocated."""
        shape, dtype = self._shape_of(result.micro_batch), self._links.dtype
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            stage = self._placement.stage(result.rank, result.chunk)
            raise ShapeError(
                f"{result} (stage {stage}) must have shape {list(shape)} and dtype {dtype}, the task's "
                f"hidden_shape and hidden_dtype; got {list(tensor.shape)} and {tensor.dtype}; change one or the other"
            )


def _channel(result: Result, receiver: int) -> Channel:
    return result.kind, result.rank < receiver


def _messages_from(schedule: Schedule, rank: int) -> Iterator[Result]:
    """Yields what ``rank`` sends to other ranks, in the order of its plan."""
    for action in schedule.plans[rank]:
        if (result := result_of(rank, action)) is None:
            continue
        place = destination(schedule.placement, result)
        if place is not None and place[0] != rank:
            yield result


def _messages(placement: Placement) -> Iterator[tuple[Result, int]]:
    """Yields the messages between ranks for one micro-batch, each with its receiver."""
    for rank in range(placement.num_ranks):
        for chunk in range(placement.num_chunks):
            following = placement.next(rank, chunk)
            if following is not None and following[0] != rank:
                yield Result("output", 0, rank, chunk), following[0]
                yield Result("input_gradient", 0, *following), rank
