"""Checked options of cross entropy: which vocabulary entries this rank's columns are, and the terms of the loss."""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from typing import Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.errors import ConfigError, ShapeError

__all__ = [
    "Part",
    "PartAndSum",
    "PartAndTerms",
    "Smoothing",
    "Terms",
    "check_target",
    "part_and_terms",
    "part_of_rank",
    "terms_of",
]

Smoothing = Literal["torch", "nemo"]
_NO_TARGET = torch.iinfo(torch.int64).min  # an ignore_index that matches no target


class Part(NamedTuple):
    """The part of the vocabulary held by the columns, the softcap of the logits, and which rows are ignored."""

    start: int  # vocabulary index of the first column
    vocab_size: int  # columns beyond this are padding
    softcap: float  # logits are softcap * tanh(x / softcap); inf for no cap
    ignore_index: int  # rows with this target have no loss


class Terms(NamedTuple):
    """The terms of the loss: (1 - smoothing) ce + smoothing (lse - mean of x) + z_loss lse^2."""

    smoothing: float
    z_loss: float


class PartAndTerms(NamedTuple):
    """``Part`` followed by ``Terms``: the last operands of the loss and gradient operators."""

    start: int
    vocab_size: int
    softcap: float
    ignore_index: int
    smoothing: float
    z_loss: float


class PartAndSum(NamedTuple):
    """The last operands of the statistics operators."""

    start: int
    vocab_size: int
    softcap: float
    ignore_index: int
    with_sum: bool  # whether to sum the logits, for smoothing


def part_and_terms(*options: Unpack[PartAndTerms]) -> tuple[Part, Terms]:
    """``Part`` and ``Terms`` from the last operands of an operator."""
    return Part(*options[:4]), Terms(*options[4:])


def part_of_rank(
    num_columns: int,
    tp_group: ProcessGroup | None,
    vocab_size: int | None,
    vocab_start: int | None,
    softcap: float | None,
    ignore_index: int | None,
) -> Part:
    """The part of the vocabulary in the ``num_columns`` columns of this rank of ``tp_group``.

    Without ``vocab_start``, all ranks have the same number of columns, the last ones padding if there are more than
    ``vocab_size``; or, if the columns add up to ``vocab_size``, this rank has its part by torch.chunk.

    Raises:
        ConfigError: an option out of range, or ``vocab_start`` without ``vocab_size``.
        ShapeError: an empty vocabulary, or a number of columns that is not this rank's part of the vocabulary.
    """
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ConfigError(f"softcap must be positive and finite, or None for no cap; got {softcap}")
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"vocab_size must be positive, or None for all columns; got {vocab_size}")
    if vocab_size is None and num_columns == 0:
        raise ShapeError("the vocabulary must not be empty; got 0 columns of logits and no vocab_size")
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    if vocab_start is None:
        start = _start_of_rank(num_columns, size, rank, vocab_size)
    elif vocab_size is None:
        raise ConfigError("vocab_start requires vocab_size, the size of the whole vocabulary; pass it too")
    elif vocab_start < 0:
        raise ConfigError(f"vocab_start must be 0 or more; got {vocab_start}")
    else:
        start = vocab_start
    return Part(
        start,
        num_columns * size if vocab_size is None else vocab_size,
        math.inf if softcap is None else float(softcap),
        _NO_TARGET if ignore_index is None else ignore_index,
    )


def terms_of(label_smoothing: float, smoothing: Smoothing, z_loss: float, vocab_size: int) -> Terms:
    """The terms of the loss; ``nemo`` smoothing spreads ``label_smoothing`` over all entries except the target.

    Raises:
        ConfigError: an option out of range.
    """
    if smoothing not in get_args(Smoothing):
        raise ConfigError(f"smoothing must be one of {', '.join(get_args(Smoothing))}; got {smoothing!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be in [0, 1]; got {label_smoothing}")
    if not 0.0 <= z_loss < math.inf:
        raise ConfigError(f"z_loss must be 0 or more, and finite; got {z_loss}")
    share = float(label_smoothing)
    if smoothing == "nemo" and share:
        if vocab_size == 1:
            raise ConfigError("smoothing='nemo' needs vocabulary entries besides the target; got vocab_size=1")
        share *= vocab_size / (vocab_size - 1)
    return Terms(share, float(z_loss))


def check_target(target: Tensor, shape: torch.Size, of: str) -> None:
    """Raises ShapeError unless ``target`` is int64 with ``shape``, the shape of ``of`` without its last dimension."""
    if target.dtype != torch.int64:
        raise ShapeError(f"target must be int64; got {target.dtype}; use target.long()")
    if target.shape != shape:
        raise ShapeError(f"target must be {list(shape)}, one for each row of {of}; got {list(target.shape)}")


def _start_of_rank(num_columns: int, size: int, rank: int, vocab_size: int | None) -> int:
    longest = num_columns if vocab_size is None else -(-vocab_size // size)
    if vocab_size is None or num_columns >= longest:
        return rank * num_columns
    start = min(rank * longest, vocab_size)
    if num_columns != min(longest, vocab_size - start):
        raise ShapeError(
            f"rank {rank} of {size} has {num_columns} columns of a vocabulary of {vocab_size}; it must have "
            f"{min(longest, vocab_size - start)}, its part by torch.chunk, or all ranks must have the same number, "
            f"padded to {longest} or more; for any other split pass vocab_start"
        )
    return start
