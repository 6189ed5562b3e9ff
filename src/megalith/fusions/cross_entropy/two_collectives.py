"""Megatron's own steps of vocabulary-parallel cross entropy, with a collective after each of the first two.

    x, m             = calculate_logits_max(logits)                        all-reduce m by maximum
    ..., sums, e     = calculate_predicted_logits(x, target, m, ...)       all-reduce sums: x_y - m and d = sum of e
    softmax, loss    = calculate_cross_entropy_loss(e, sums)               loss = log d - (x_y - m)
    dx               = calculate_gradients(softmax, dloss, ...)            dx = (softmax - [v = y]) dloss

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053. They save softmax in float32, 4 bytes per logit, and are
inaccurate for tiny losses; ``fused_vocab_parallel_cross_entropy`` avoids both. They exist for comparison and for code
that calls them by name. No input is modified.
"""

import torch
from torch import Tensor

from megalith.fusions.core.rows import wide

__all__ = [
    "calculate_cross_entropy_loss",
    "calculate_gradients",
    "calculate_logits_max",
    "calculate_predicted_logits",
]


def calculate_logits_max(vocab_parallel_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits [..., V/tp] in float32 or wider, and the maximum of each row [...] over this rank's part."""
    x = vocab_parallel_logits.to(wide(vocab_parallel_logits.dtype))
    return x, x.amax(dim=-1)


def calculate_predicted_logits(
    vocab_parallel_logits: Tensor, target: Tensor, logits_max: Tensor, vocab_start_index: int, vocab_end_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns this rank's contribution to the sums, and what backward needs.

    Args:
        vocab_parallel_logits: [..., V/tp], as returned by ``calculate_logits_max``.
        target: int64 [...].
        logits_max: [...], the maximum of each row over all ranks.
        vocab_start_index: vocabulary index of the first column.
        vocab_end_index: vocabulary index of the last column, plus one.

    Returns:
        Bool [...], True if another rank holds the target; the target's column, int64 [T], 0 in that case; the shifted
        logit of the target, 0 in that case, and the sum of exponentials, concatenated along dimension 0: [2, ...] with
        the first two dimensions flattened; the exponentials [..., V/tp].
    """
    shifted = vocab_parallel_logits - logits_max.unsqueeze(-1)
    target_mask = (target < vocab_start_index) | (target >= vocab_end_index)
    column = (target - vocab_start_index).masked_fill(target_mask, 0)
    predicted = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(target_mask, 0.0)
    exp_logits = torch.exp(shifted)
    return target_mask, column.reshape(-1), torch.cat((predicted, exp_logits.sum(dim=-1))), exp_logits


def calculate_cross_entropy_loss(exp_logits: Tensor, predicted_logits_sum_exp_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the softmax [..., V/tp] of this rank's part and the loss [...], given the sums over all ranks."""
    predicted, total = predicted_logits_sum_exp_logits.chunk(2)
    return exp_logits / total.unsqueeze(-1), torch.log(total) - predicted


def calculate_gradients(
    softmax: Tensor,
    grad_output: Tensor,
    target_mask: Tensor,
    masked_target_1d: Tensor,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the gradient of the logits [..., V/tp] in ``logits_dtype``, which defaults to that of ``softmax``.

    ``grad_output`` is [...]; the other arguments are results of the previous steps.
    """
    hit = (~target_mask).to(softmax.dtype).unsqueeze(-1)
    column = masked_target_1d.view_as(target_mask).unsqueeze(-1)
    return (softmax.scatter_add(-1, column, -hit) * grad_output.unsqueeze(-1)).to(logits_dtype or softmax.dtype)
