"""A rank's part of a model that is cut into stages, and the way of micro-batches through all of it."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megalith.errors import ConfigError
from megalith.parallel.pipeline.executor import Forward, execute
from megalith.parallel.pipeline.links import Links, ShapeOf
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Schedule
from megalith.parallel.pipeline.schedules import build_schedule, forward_only
from megalith.parallel.sharding.fsdp import release_gathered_weights

__all__ = ["Pipeline"]

_RUNNABLE = ("gpipe", "1f1b", "interleaved")

Chunk = TypeVar("Chunk", bound=nn.Module)


@dataclass(frozen=True)
class Pipeline(Generic[Chunk]):
    """The chunks of one rank; by default the whole model, in one process or without a pipeline.

    Attributes:
        chunks: one module a chunk, in the order of ``placement``.
        schedule: the name of the order in which a step's micro-batches are taken.
        shared: parameters of which another stage has a copy, and ``shared_group`` the ranks of both.
    """

    chunks: Sequence[Chunk]
    placement: Placement = field(default_factory=lambda: Placement(1))
    schedule: str = "1f1b"
    links: Links = field(default_factory=Links)
    shared: tuple[nn.Parameter, ...] = ()
    shared_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.schedule not in _RUNNABLE:
            raise ConfigError(
                f"schedule must be one without a split backward, {', '.join(_RUNNABLE)}; got {self.schedule!r}, which "
                "can be simulated only"
            )

    def holds_output(self, chunk: nn.Module) -> bool:
        """Whether ``chunk``, one of this rank's, is the last stage: what it gives is the model's output."""
        index = next(index for index, mine in enumerate(self.chunks) if mine is chunk)
        return self.placement.next(self.links.rank, index) is None

    def train(self, num_microbatches: int, forward: Forward, shape_of: ShapeOf) -> None:
        """Every micro-batch forward and backward through all stages; gradients are left in the parameters."""
        schedule = _schedule(self.schedule, self.placement.num_ranks, num_microbatches, self.placement.num_chunks)
        execute(schedule, self.links, self.chunks, forward, shape_of)
        self._sum_shared_gradients()

    def evaluate(self, num_microbatches: int, forward: Forward, shape_of: ShapeOf) -> None:
        """Every micro-batch forward through all stages; inside ``evaluating`` and without gradients."""
        execute(_forward_only(self.placement, num_microbatches), self.links, self.chunks, forward, shape_of)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the ``with`` block the chunks are in evaluation mode; their modes and sharded weights are restored."""
        training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk, was_training in zip(self.chunks, training, strict=True):
                release_gathered_weights(chunk)
                chunk.train(was_training)

    def _sum_shared_gradients(self) -> None:
        for weight in self.shared:
            assert weight.grad is not None, "every stage uses its weights"
            gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            dist.all_reduce(gradient, group=self.shared_group)


# a step's schedule is that of the step before, unless the batch size changes
@functools.lru_cache(maxsize=8)
def _schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    return build_schedule(name, num_ranks, num_microbatches, num_chunks)


@functools.lru_cache(maxsize=8)
def _forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    return forward_only(placement, num_microbatches)
