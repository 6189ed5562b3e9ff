"""The training loss: cross entropy over a vocabulary that is split over tp as by torch.chunk.

It is computed from logits, or fused with the output projection a chunk of tokens at a time.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.traffic import Passes, collective

__all__ = ["loss_traffic", "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Returns the loss of every token, the same on all ranks of ``tp_group``. The vocabulary has no padding.

    Args:
        logits: [S, B, V/tp], this rank's part, with V split as by torch.chunk.
        target: int64 [S, B], in [0, V). The loss of a target outside that range is NaN, so that it is not overlooked.
        vocab_size: V.
        label_smoothing: in [0, 1]; over the whole vocabulary, as in torch.nn.functional.cross_entropy.
        softcap: c, to replace logits by c tanh(logits / c) first; None: no capping.

    Returns:
        [S, B] in float32, or float64 for float64 logits.

    Raises:
        ShapeError: the logits are not this rank's part of the vocabulary, or do not fit the targets.
    """
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    first, end = chunk_range(vocab_size, size, rank)
    if logits.shape != (*target.shape, end - first):
        raise ShapeError(
            f"logits must have shape {[*target.shape, end - first]} for targets {list(target.shape)} "
            f"(rank {rank} of {size}, vocabulary of {vocab_size}); got {list(logits.shape)}"
        )
    return fused_vocab_parallel_cross_entropy(
        logits,
        target,
        tp_group,
        label_smoothing=label_smoothing,
        softcap=softcap,
        ignore_index=None,
        vocab_size=vocab_size,
        vocab_start=first,
    )


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    *,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """``vocab_parallel_cross_entropy`` of the logits ``x weight^T + bias``, computed a chunk of tokens at a time.

    Args:
        x: [S, B, H], the same on all ranks of ``tp_group``; [S/tp, B, H] with ``sequence_parallel``. Gathered here; its
            gradient is summed over ``tp_group``.
        weight: [V/tp, H], this rank's part, with V split as by torch.chunk.
        target: int64 [S, B], in [0, V).
        vocab_size: V.
        bias: [V/tp], split in the same way.

    Returns:
        [S, B] in float32, or float64 for float64 inputs.

    Raises:
        ShapeError: the weight is not this rank's part of the vocabulary, or ``x`` does not fit the targets.
    """
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    first, end = chunk_range(vocab_size, size, rank)
    if weight.shape[0] != end - first:
        raise ShapeError(
            f"weight must have {end - first} rows (rank {rank} of {size}, vocabulary of {vocab_size}); "
            f"got {list(weight.shape)}"
        )
    return fused_linear_cross_entropy(
        x,
        weight,
        target,
        tp_group,
        bias=bias,
        sequence_parallel=sequence_parallel,
        softcap=softcap,
        ignore_index=None,
        vocab_size=vocab_size,
        vocab_start=first,
    )


def loss_traffic(num_tokens: int, dtype: torch.dtype, tp_size: int) -> Passes:
    """Returns what the loss exchanges without label smoothing: three numbers per token, in forward."""
    wide = torch.promote_types(dtype, torch.float32)
    return Passes(collective("tensor", "all_gather", 3 * num_tokens * wide.itemsize * tp_size, tp_size))
