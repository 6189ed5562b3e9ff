"""The two steps of a cross-entropy path, and the only collective, which runs between them.

Used both for given logits and for those of an output projection, computed chunk by chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.fusions.cross_entropy.options import Part, Terms
from megalith.topology.collectives import gather_from_sequence_parallel_region

__all__ = ["Steps", "loss_of_parts", "steps_of_operators"]


class Steps(NamedTuple):
    """The two steps of a path, with the collective between them: operator schemas cannot express its process group."""

    statistics: Callable[..., Tensor]  # (*inputs, target, *part, with_sum) -> [T, 3 or 4]
    loss: Callable[..., Tensor]  # (*inputs, target, those of all parts [R, T, 3 or 4], *part, *terms) -> [T]


def steps_of_operators(statistics: Callable[..., Tensor], loss: Callable[..., tuple[Tensor, Tensor]]) -> Steps:
    """Steps from two operators; the second returns the loss and what its gradient needs."""

    def detached(*inputs: object) -> Tensor:  # the loss operator computes the whole gradient
        return statistics(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))

    return Steps(detached, lambda *inputs: loss(*inputs)[0])


def loss_of_parts(
    steps: Steps, inputs: tuple[object, ...], target: Tensor, tp_group: ProcessGroup | None, part: Part, terms: Terms
) -> Tensor:
    """The loss [T] of ``inputs``, this rank's tensors. Performs one collective over ``tp_group``."""
    found = steps.statistics(*inputs, target, *part, terms.smoothing > 0.0)
    # every rank computes the same loss from the gathered statistics, so each takes its own slice of the gradient
    parts = gather_from_sequence_parallel_region(found.unsqueeze(0), tp_group, tensor_parallel_output_grad=False)
    return steps.loss(*inputs, target, parts, *part, *terms)
