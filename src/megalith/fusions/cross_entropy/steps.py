"""The two halves of a path of cross entropy, and its one collective between them.

Of logits that are given, and of those of an output projection that are made chunk by chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.fusions.cross_entropy.options import Part, Terms
from megalith.topology.collectives import gather_from_sequence_parallel_region

__all__ = ["Steps", "loss_of_parts", "steps_of_operators"]


class Steps(NamedTuple):
    """The two halves of a path. Between them is the collective, of a group that no operator's schema can hold."""

    statistics: Callable[..., Tensor]  # (*inputs, target, *part, with_sum) -> [T, 3 or 4]
    loss: Callable[..., Tensor]  # (*inputs, target, those of all parts [R, T, 3 or 4], *part, *terms) -> [T]


def steps_of_operators(statistics: Callable[..., Tensor], loss: Callable[..., tuple[Tensor, Tensor]]) -> Steps:
    """The steps that two operators are, of which the second gives the loss and what its gradient needs."""

    def detached(*inputs: object) -> Tensor:  # the gradient of the statistics is that of the loss
        return statistics(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))

    return Steps(detached, lambda *inputs: loss(*inputs)[0])


def loss_of_parts(
    steps: Steps, inputs: tuple[object, ...], target: Tensor, tp_group: ProcessGroup | None, part: Part, terms: Terms
) -> Tensor:
    """The loss [T] of ``inputs``, this rank's tensors of rows; the one collective is here."""
    found = steps.statistics(*inputs, target, *part, terms.smoothing > 0.0)
    # every rank computes the same loss of what is gathered, so each takes its own slice of the gradient
    parts = gather_from_sequence_parallel_region(found.unsqueeze(0), tp_group, tensor_parallel_output_grad=False)
    return steps.loss(*inputs, target, parts, *part, *terms)
