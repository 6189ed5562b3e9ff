"""Cross entropy over a vocabulary that is split over tp; no rank ever holds a whole row of logits.

    loss = log sum_v exp(z_v) - (1 - a) z_y - a / V * sum_v z_v,    a = label_smoothing
    dz_v = dloss * (softmax(z)_v - (1 - a) [v = y] - a / V)

Forward: one all-reduce of the maximum, one of three sums. The smoothing of torch.nn.functional.cross_entropy, over the
whole vocabulary. Saved for backward: the logits as they came, and one number per token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.errors import ShapeError
from megalith.parallel.boxes import split_evenly

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of every token, equal on all ranks of ``tp_group``.

    Args:
        logits: [S, B, V/tp], this rank's part, split as torch.chunk splits V.
        target: int64 [S, B], in [0, V); the loss of another is NaN.
        vocab_size: V.
        label_smoothing: in [0, 1).

    Returns:
        [S, B] in float32, or float64 for float64 logits.

    Raises:
        ShapeError: the logits are not this rank's part of the vocabulary, or do not fit the targets.
    """
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    first, end = split_evenly(vocab_size, size, rank)
    if logits.shape != (*target.shape, end - first):
        raise ShapeError(
            f"logits must be {[*target.shape, end - first]}: rank {rank} of {size}'s part of {vocab_size} for targets "
            f"{list(target.shape)}; got {list(logits.shape)}"
        )
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, target, first, vocab_size, tp_group, label_smoothing)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        first: int,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
        smoothing: float,
    ) -> Tensor:
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = z.amax(dim=-1)  # [S, B]
        if tp_group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, tp_group)
        row, elsewhere = _own_rows(target, first, z.shape[-1])
        target_logit = z.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        target_logit = target_logit.masked_fill((target < 0) | (target >= vocab_size), float("nan"))
        exponents = torch.exp(z - largest.unsqueeze(-1)).sum(dim=-1)
        sums = torch.stack((exponents, target_logit, z.sum(dim=-1) if smoothing else torch.zeros_like(largest)))
        if tp_group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, tp_group)
        log_normalizer = torch.log(sums[0]) + largest  # [S, B]
        ctx.save_for_backward(logits, log_normalizer, target)
        ctx.first, ctx.vocab_size, ctx.smoothing = first, vocab_size, smoothing
        return log_normalizer - (1.0 - smoothing) * sums[1] - smoothing / vocab_size * sums[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_normalizer, target = ctx.saved_tensors
        dz = torch.exp(logits.to(log_normalizer.dtype) - log_normalizer.unsqueeze(-1))
        if ctx.smoothing:
            dz -= ctx.smoothing / ctx.vocab_size
        row, elsewhere = _own_rows(target, ctx.first, logits.shape[-1])
        hit = torch.full_like(log_normalizer, ctx.smoothing - 1.0).masked_fill(elsewhere, 0.0)
        dz.scatter_add_(-1, row.unsqueeze(-1), hit.unsqueeze(-1))
        dz *= dloss.unsqueeze(-1)
        return dz.to(logits.dtype), None, None, None, None, None


def _own_rows(target: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Targets as indices into this rank's part, 0 where another rank holds them; and where that is."""
    elsewhere = (target < first) | (target >= first + size)
    return (target - first).masked_fill(elsewhere, 0), elsewhere
