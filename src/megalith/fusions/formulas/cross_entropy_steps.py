"""The two halves of a path of cross entropy, around its one collective, in plain torch: reference and blocked.

Used for logits that are given, and for those of an output projection that are made chunk by chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.fusions.formulas.cross_entropy import empty_statistics, gradient, loss_of, merged, statistics
from megalith.fusions.formulas.cross_entropy_options import Part, Terms
from megalith.fusions.paths.blocks import by_blocks
from megalith.topology.collectives import gather_from_sequence_parallel_region

__all__ = [
    "Steps",
    "blocked_gradient_into",
    "blocked_loss",
    "blocked_statistics",
    "kept_for_gradient",
    "loss_of_parts",
    "reference_loss",
    "reference_statistics",
]


class Steps(NamedTuple):
    """The two halves of a path. Between them is the collective, of a group that no operator's schema can hold."""

    statistics: Callable[..., Tensor]  # (*inputs, target, *part, with_sum) -> [T, 3 or 4]
    loss: Callable[..., Tensor]  # (*inputs, target, those of all parts [R, T, 3 or 4], *part, *terms) -> [T]


def loss_of_parts(
    steps: Steps, inputs: tuple[Any, ...], target: Tensor, tp_group: ProcessGroup | None, part: Part, terms: Terms
) -> Tensor:
    """The loss [T] of ``inputs``, this rank's tensors of rows; the one collective is here."""
    found = steps.statistics(*inputs, target, *part, terms.smoothing > 0.0)
    # every rank computes the same loss of what is gathered, so each takes its own slice of the gradient
    parts = gather_from_sequence_parallel_region(found.unsqueeze(0), tp_group, tensor_parallel_output_grad=False)
    return steps.loss(*inputs, target, parts, *part, *terms)


def kept_for_gradient(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Of (*tensors, target, parts, *part, *terms) all but ``parts``: in its place the statistics of the vocabulary."""
    tensors, options = inputs[:-7], inputs[-6:]
    return (*tensors, outputs[1], *options)


def reference_statistics(
    logits: Tensor, target: Tensor, start: int, vocab_size: int, softcap: float, ignore_index: int, with_sum: bool
) -> Tensor:
    """What this part says of each row, differentiable."""
    counted = logits.masked_fill((target == ignore_index).unsqueeze(-1), 0.0)  # NaN times 0 is NaN, also in a gradient
    return statistics(counted, target, start, vocab_size, softcap, with_sum)


def reference_loss(
    logits: Tensor,
    target: Tensor,
    parts: Tensor,
    start: int,
    vocab_size: int,
    softcap: float,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """The loss, whose gradient flows through ``parts``."""
    whole = merged(parts, target, vocab_size, ignore_index)
    return loss_of(whole, target, vocab_size, ignore_index, smoothing, z_loss)


def blocked_statistics(
    logits: Tensor, target: Tensor, start: int, vocab_size: int, softcap: float, ignore_index: int, with_sum: bool
) -> Tensor:
    """What this part says of each row, over blocks of rows."""
    found = empty_statistics(logits, with_sum)

    def formula(logits: Tensor, target: Tensor) -> tuple[Tensor]:
        return (statistics(logits, target, start, vocab_size, softcap, with_sum),)

    by_blocks(formula, (logits, target), (found,))
    return found


def blocked_loss(
    logits: Tensor,
    target: Tensor,
    parts: Tensor,
    start: int,
    vocab_size: int,
    softcap: float,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """The loss, and the statistics (m, d, x_y) of the whole vocabulary that its gradient reads."""
    whole = merged(parts, target, vocab_size, ignore_index)
    return loss_of(whole, target, vocab_size, ignore_index, smoothing, z_loss), whole[:, :3].clone()


def blocked_gradient_into(
    dlogits: Tensor,
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    whole: Tensor,
    start: int,
    vocab_size: int,
    softcap: float,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """Fills ``dlogits``, which may be ``logits`` itself, over blocks of rows."""

    def formula(dloss: Tensor, logits: Tensor, target: Tensor, whole: Tensor) -> tuple[Tensor]:
        return (gradient(dloss, logits, target, whole, start, vocab_size, softcap, ignore_index, smoothing, z_loss),)

    by_blocks(formula, (dloss, logits, target, whole), (dlogits,))
