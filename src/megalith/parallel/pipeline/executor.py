"""Runs a plan: the one place where a step's forwards and backwards happen, in training and in evaluation."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from megalith.parallel.pipeline.plan import Plan
from megalith.parallel.sharding.fsdp import gradient_sync

__all__ = ["execute"]

# (the chunk's module, the number of the micro-batch) -> what the forward gives: a scalar if a backward follows
Forward = Callable[[nn.Module, int], Tensor]


def execute(plan: Plan, chunks: Sequence[nn.Module], forward: Forward) -> None:
    """Does every action of ``plan`` with this rank's ``chunks``.

    A forward's result is kept until its backward, and not at all if it has none. Gradients accumulate in the chunks'
    parameters; they are reduced over data-parallel ranks in the backward that the plan marks.
    """
    with_backward = {(action.chunk, action.micro_batch) for action in plan if action.kind == "backward"}
    results: dict[tuple[int, int], Tensor] = {}
    for action in plan:
        chunk, place = chunks[action.chunk], (action.chunk, action.micro_batch)
        if action.kind == "forward":
            result = forward(chunk, action.micro_batch)
            if place in with_backward:
                results[place] = result
        else:
            gradient_sync(chunk, last=action.reduces)
            results.pop(place).backward()
