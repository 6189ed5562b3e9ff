"""The zig-zag split of a sequence: which positions each rank of cp holds.

A row of S tokens is cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r. Under the causal rule an early chunk
sees few keys and its late partner many: together every rank has the same number of pairs of a query and a key. Packed
documents are cut as they come, so that ranks whose chunks hold short ones have less to do.

The ranks [i m, i m + i) of a split over cp hold what rank m of a split over cp / i would hold, which is why a group of
ranks may put its parts together and go on as one.

Brandon et al. 2023, "Striped Attention", arXiv:2311.09431, name the imbalance; the zig-zag is Llama 3's split too
(arXiv:2407.21783, section 3.3.2).
"""

import torch
from torch import Tensor

from megalith.errors import ShapeError

__all__ = ["zigzag_join", "zigzag_positions", "zigzag_spans", "zigzag_split"]


def zigzag_spans(seq_length: int, size: int, rank: int) -> list[range]:
    """The positions that ``rank`` of ``size`` holds, in order: two ranges, or one where its chunks are neighbours.

    Raises:
        ShapeError: 2 ``size`` chunks do not divide ``seq_length``.
    """
    if seq_length % (2 * size):
        raise ShapeError(
            f"context parallelism cuts a row into {2 * size} chunks, twice the number of ranks, and {seq_length} "
            f"tokens are not divisible by that; use a multiple of {2 * size}"
        )
    n = seq_length // (2 * size)
    early = range(rank * n, (rank + 1) * n)
    late = range(seq_length - early.stop, seq_length - early.start)
    return [range(early.start, late.stop)] if early.stop == late.start else [early, late]


def zigzag_positions(seq_length: int, size: int, rank: int) -> Tensor:
    """int64 [S/cp]: the positions that ``rank`` of ``size`` holds, in order. Raises ShapeError as ``zigzag_spans``."""
    spans = zigzag_spans(seq_length, size, rank)
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


def zigzag_join(parts: Tensor, size: int) -> Tensor:
    """The parts of ``size`` ranks one after another, along dim 0, -> the sequence in its order."""
    chunks = parts.chunk(2 * size)
    return torch.cat([*chunks[::2], *chunks[::-2]])


def zigzag_split(sequence: Tensor, size: int) -> Tensor:
    """The inverse of ``zigzag_join``: the sequence, along dim 0, -> the parts of ``size`` ranks one after another."""
    chunks = sequence.chunk(2 * size)
    return torch.cat([chunk for rank in range(size) for chunk in (chunks[rank], chunks[2 * size - 1 - rank])])
