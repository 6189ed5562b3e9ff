"""Implements the formulas stated in ``linear``, at once or in chunks.

Statistics, loss and gradient for given logits come from a path of cross entropy; this module computes, uses and
discards the logits of one tile at a time: in forward those of some tokens, for their statistics, and in backward those
of all tokens for a part of the vocabulary, as on a rank that holds only that part, or of some tokens if there are more
tokens than rows of the weight. So the larger of dx and the weight's gradient is written once, and the smaller is a sum.
T tokens, H hidden, n rows of the weight in this part.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import linear

from megalith.fusions.core.autocast import without_autocast
from megalith.fusions.core.registration import Operator, register_without_gradient
from megalith.fusions.core.row_wise import RUNNERS
from megalith.fusions.core.rows import wide
from megalith.fusions.cross_entropy import blocked as cross_entropy_blocked
from megalith.fusions.cross_entropy import formulas as cross_entropy
from megalith.fusions.cross_entropy.options import PartAndSum, PartAndTerms
from megalith.fusions.cross_entropy.steps import Steps, steps_of_operators

__all__ = ["OPERATOR", "blocked", "reference", "steps_by_chunks"]

_MULTIPLE = 64  # parts of the vocabulary, except the last, have a multiple of this many rows, for faster products


class _OfBack(NamedTuple):
    """The last operands of backward: those of the loss, and which gradients are needed."""

    start: int
    vocab_size: int
    softcap: float
    ignore_index: int
    smoothing: float
    z_loss: float
    needs: list[bool]


def _statistics_outputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    target: Tensor,
    *options: Unpack[PartAndSum],
) -> Tensor:
    return cross_entropy.empty_statistics(x, PartAndSum(*options).with_sum)


def _outputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    target: Tensor,
    parts: Tensor,
    *_: Unpack[PartAndTerms],
) -> tuple[Tensor, Tensor]:
    return cross_entropy.empty_loss(x)


def _gradients(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    target: Tensor,
    whole: Tensor,
    *options: Unpack[_OfBack],
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates dx, dweight and dbias, empty for those not needed."""
    dx, dweight, dbias = map(x.new_empty, _sizes(x, weight, bias, _OfBack(*options).needs))
    return dx, dweight, dbias


OPERATOR = Operator(_outputs, _gradients, of=("x", "weight", "bias"), saves=cross_entropy.kept_for_gradient)


def _reference_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int, target: Tensor, *options: Unpack[PartAndSum]
) -> Tensor:
    with without_autocast(x):  # logits are computed twice, and backward may run outside autocast
        return cross_entropy.reference.statistics(linear(x, weight, bias), target, *options)


def _reference_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    target: Tensor,
    parts: Tensor,
    *options: Unpack[PartAndTerms],
) -> Tensor:
    return cross_entropy.reference.loss(x, target, parts, *options)


reference = Steps(_reference_statistics, _reference_loss)


def steps_by_chunks(
    name: str,
    statistics: Callable[..., Tensor],
    loss: Callable[..., tuple[Tensor, Tensor]],
    gradient_into: Callable[..., None],
) -> Steps:
    """The steps for (x [T, H], weight [n, H], bias [n] or None, chunk_size), given those for logits [T, n]."""
    of_logits = _OfLogits(statistics, loss, gradient_into)
    return steps_of_operators(
        register_without_gradient(
            f"{name}_statistics", of_logits.statistics_of_chunks, _statistics_outputs, opaque=True
        ),
        OPERATOR.register(name, of_logits.loss_of_chunks, of_logits.gradients, opaque=True),
    )


class _OfLogits(NamedTuple):
    """The functions of a path for the logits of a chunk; the methods are the operators' functions for all tokens."""

    statistics: Callable[..., Tensor]
    loss: Callable[..., tuple[Tensor, Tensor]]
    gradient_into: Callable[..., None]

    def statistics_of_chunks(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        target: Tensor,
        *options: Unpack[PartAndSum],
    ) -> Tensor:
        found = _statistics_outputs(x, weight, bias, chunk_size, target, *options)
        with without_autocast(x):
            for rows in _chunks_of_tokens(x, chunk_size):
                found[rows] = self.statistics(linear(x[rows], weight, bias), target[rows], *options)
        return found

    def loss_of_chunks(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        target: Tensor,
        parts: Tensor,
        *options: Unpack[PartAndTerms],
    ) -> tuple[Tensor, Tensor]:
        return self.loss(x, target, parts, *options)

    def gradients(
        self,
        dloss: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        target: Tensor,
        whole: Tensor,
        *options: Unpack[_OfBack],
    ) -> tuple[Tensor, Tensor, Tensor]:
        start, needs = options[0], _OfBack(*options).needs
        tiles = _tiles(x, weight, chunk_size)
        # a single product is rounded once anyway; several are summed in a wide accumulator
        kinds = (wide(x.dtype) if len({tile[dim].start for tile in tiles}) > 1 else x.dtype for dim in (1, 0, 0))
        sizes = _sizes(x, weight, bias, needs)
        dx, dweight, dbias = (x.new_zeros(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True))
        with without_autocast(x):
            for rows, words in tiles:
                dlogits = logits = linear(x[rows], weight[words], None if bias is None else bias[words])
                rest = target[rows], whole[rows], start + words.start, *options[1:-1]
                self.gradient_into(dlogits, dloss[rows], logits, *rest)
                if needs[0]:
                    _add_product(dx[rows], dlogits, weight[words], first=words.start == 0)
                if needs[1]:
                    _add_product(dweight[words], dlogits.t(), x[rows], first=rows.start == 0)
                if needs[2]:
                    dbias[words] += dlogits.sum(dim=0, dtype=dbias.dtype)
                del dlogits, logits  # before those of the next tile are made
        return dx.to(x.dtype), dweight.to(x.dtype), dbias.to(x.dtype)


def _chunks_of_tokens(x: Tensor, chunk_size: int) -> list[slice]:
    return _slices(len(x), chunk_size)


def _tiles(x: Tensor, weight: Tensor, chunk_size: int) -> list[tuple[slice, slice]]:
    """Tokens and rows of ``weight`` of each tile of logits, as large as those of a chunk of tokens.

    Either all tokens and a part of the vocabulary, so that only dx is a sum over tiles; or, if there are more tokens
    than rows of ``weight``, a chunk of them and the whole vocabulary: then the weight's gradient is smaller.
    """
    T, n = len(x), len(weight)
    if n < T:
        return [(rows, slice(0, n)) for rows in _chunks_of_tokens(x, chunk_size)]
    most = n if chunk_size >= T else n * chunk_size // T // _MULTIPLE * _MULTIPLE
    num_parts = max(1, -(-n // max(_MULTIPLE, most)))
    return [(slice(0, T), words) for words in _slices(n, -(-n // num_parts // _MULTIPLE) * _MULTIPLE or 1)]


def _slices(length: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, length, size)]


def _sizes(x: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> list[list[int]]:
    """The sizes of the gradients that are needed; [0] for the others."""
    given = zip((x, weight, bias), needs, strict=True)
    return [list(one.shape) if one is not None and needed else [0] for one, needed in given]


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Adds ``a`` @ ``b`` to ``total``, in its dtype or float32; if ``first``, ``total`` is known to be zero."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0.0 if first else 1.0, out=total)
    elif a.is_cuda and torch.version.hip is None:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b  # on other devices the product of each chunk is rounded to its dtype first


blocked = steps_by_chunks(
    "linear_cross_entropy_blocked",
    partial(cross_entropy_blocked.statistics, RUNNERS["blocked"]),
    cross_entropy.loss_of_whole,
    partial(cross_entropy_blocked.gradient_into, RUNNERS["blocked"]),
)
