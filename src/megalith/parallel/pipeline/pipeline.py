"""A rank's part of a model that is split into stages, and running micro-batches through all stages."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megalith.errors import ConfigError
from megalith.parallel.pipeline.executor import Forward, execute
from megalith.parallel.pipeline.links import Links, ShapeOf
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Schedule
from megalith.parallel.pipeline.schedules import build_schedule, forward_only, splits_backward
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.parallel.sharding.fsdp import release_gathered_weights

__all__ = ["Pipeline", "evaluation_mode"]

Chunk = TypeVar("Chunk", bound=nn.Module)


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts ``modules`` in evaluation mode inside the ``with`` block, and restores their training mode afterwards."""
    in_training = [module for module in modules if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


@dataclass(frozen=True)
class Pipeline(Generic[Chunk]):
    """The chunks of one rank; with the default settings one chunk, the whole model, without pipeline parallelism.

    Attributes:
        chunks: one module per chunk, in the order of ``placement``.
        schedule: the name of the schedule of training steps.
        split_product: the matrix product of the chunks if the schedule splits backwards.
        shared: parameters that are copied in stages on other ranks, with the group of the ranks that have a copy.
        copies: pairs of a parameter and its copy in another chunk of this rank. The copy has the same name, and is
            skipped where parameters are listed: the optimizer and checkpoints see only the original, whose values are
            written to the copy before each use.

    Raises:
        ConfigError: a schedule that splits backwards without ``split_product``, or a ``split_product`` for a schedule
            that does not split them.
    """

    chunks: Sequence[Chunk]
    placement: Placement = field(default_factory=lambda: Placement(1))
    schedule: str = "1f1b"
    links: Links = field(default_factory=Links)
    split_product: SplitProduct | None = None
    shared: Sequence[tuple[nn.Parameter, ProcessGroup]] = ()
    copies: Sequence[tuple[nn.Parameter, nn.Parameter]] = ()

    def __post_init__(self) -> None:
        if splits_backward(self.schedule) != (self.split_product is not None):
            raise ConfigError(
                "split_product must be the SplitProduct of the chunks' matrix products if the schedule splits "
                f"backwards, and None otherwise; got {self.split_product!r} for schedule={self.schedule!r}"
            )

    def holds_output(self, chunk: nn.Module) -> bool:
        """Whether ``chunk``, one of this rank's, is the last stage, whose output is the model's."""
        index = next(index for index, mine in enumerate(self.chunks) if mine is chunk)
        return self.placement.next(self.links.rank, index) is None

    def train(self, num_microbatches: int, forward: Forward, shape_of: ShapeOf) -> None:
        """Runs every micro-batch forward and backward through all stages; gradients are left in the parameters."""
        schedule = _schedule(self.schedule, self.placement.num_ranks, num_microbatches, self.placement.num_chunks)
        self._refresh_copies()
        execute(schedule, self.links, self.chunks, forward, shape_of, self.split_product)
        self._sum_shared_gradients()

    def evaluate(self, num_microbatches: int, forward: Forward, shape_of: ShapeOf) -> None:
        """Runs every micro-batch forward through all stages; call it inside ``evaluating`` and without gradients."""
        execute(_forward_only(self.placement, num_microbatches), self.links, self.chunks, forward, shape_of)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the chunks in evaluation mode inside the ``with`` block; then restores modes and reshards weights."""
        with self.holding_weights(), evaluation_mode(self.modules()):
            yield

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Updates the copies, and keeps weights that forwards gather until the end of the ``with`` block."""
        self._refresh_copies()
        try:
            yield
        finally:
            for chunk in self.chunks:
                release_gathered_weights(chunk)

    def modules(self) -> list[nn.Module]:
        """All modules of the chunks."""
        return [module for chunk in self.chunks for module in chunk.modules()]

    def _sum_shared_gradients(self) -> None:
        for weight, copy in self.copies:
            _gradient_here(weight).add_(_gradient_here(copy))
            copy.grad = None
        for weight, group in self.shared:
            dist.all_reduce(_gradient_here(weight), group=group)

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        for weight, copy in self.copies:
            copy.copy_(weight)


def _gradient_here(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, "every stage uses its weights"
    return weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad


# the schedule stays the same from step to step unless the batch size changes
@functools.lru_cache(maxsize=8)
def _schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    return build_schedule(name, num_ranks, num_microbatches, num_chunks)


@functools.lru_cache(maxsize=8)
def _forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    return forward_only(placement, num_microbatches)
