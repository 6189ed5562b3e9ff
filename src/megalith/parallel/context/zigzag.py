"""The zig-zag split of a sequence: which positions each rank of cp holds.

A row of S tokens is split into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r. With a causal mask an early chunk
sees few keys and its late counterpart many, so that every rank has the same number of (query, key) pairs. Packed
documents are split regardless of their borders, so ranks whose chunks contain short documents have less work.

The ranks [i m, i m + i) of a split over cp together hold what rank m of a split over cp / i would hold, so a group of
ranks can join its parts and act as one.

The imbalance is described by Brandon et al. 2023, "Striped Attention", arXiv:2311.09431. Llama 3 uses the zig-zag split
too (arXiv:2407.21783, section 3.3.2).
"""

import torch
from torch import Tensor

from megalith.errors import ShapeError

__all__ = ["zigzag_join", "zigzag_positions", "zigzag_spans", "zigzag_split"]


def zigzag_spans(seq_length: int, size: int, rank: int) -> list[range]:
    """Returns the positions that ``rank`` of ``size`` holds, in order: two ranges, or one if its chunks are adjacent.

    Raises:
        ShapeError: ``seq_length`` is not divisible by 2 ``size``, and there is more than one rank.
    """
    if size == 1:
        return [range(seq_length)]
    if seq_length % (2 * size):
        raise ShapeError(
            f"context parallelism splits a row into {2 * size} chunks, two per rank, and its length ({seq_length}) "
            f"must be divisible by that; use a multiple of {2 * size}"
        )
    n = seq_length // (2 * size)
    early = range(rank * n, (rank + 1) * n)
    late = range(seq_length - early.stop, seq_length - early.start)
    return [range(early.start, late.stop)] if early.stop == late.start else [early, late]


def zigzag_positions(seq_length: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Returns int64 [S/cp], the positions that ``rank`` holds, in order. Raises ShapeError like ``zigzag_spans``."""
    spans = zigzag_spans(seq_length, size, rank)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def zigzag_join(parts: Tensor, size: int) -> Tensor:
    """Joins the parts of ``size`` ranks, concatenated along dim 0, into the sequence in order."""
    chunks = parts.chunk(2 * size)
    return torch.cat([*chunks[::2], *chunks[::-2]])


def zigzag_split(sequence: Tensor, size: int) -> Tensor:
    """Inverse of ``zigzag_join``: reorders the sequence along dim 0 into the concatenated parts of ``size`` ranks."""
    chunks = sequence.chunk(2 * size)
    return torch.cat([chunk for rank in range(size) for chunk in (chunks[rank], chunks[2 * size - 1 - rank])])
