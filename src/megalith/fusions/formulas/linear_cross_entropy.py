"""Output projection and cross entropy over chunks of tokens: builds the two operators of a path.

The statistics, the loss and the gradient of given logits are the path's own; here the logits of a chunk are made, used,
and dropped.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from megalith.fusions.formulas.cross_entropy import empty_loss, empty_statistics
from megalith.fusions.formulas.cross_entropy_steps import Steps, kept_for_gradient
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.library import register, register_without_gradient

__all__ = ["steps_by_chunks"]


def steps_by_chunks(
    name: str,
    statistics: Callable[..., Tensor],
    loss: Callable[..., tuple[Tensor, Tensor]],
    gradient_into: Callable[..., None],
) -> Steps:
    """The steps of (x [T, H], weight [n, H], bias [n] or None, chunk_size) from those of logits [T, n]."""
    of_logits = _OfLogits(statistics, loss, gradient_into)
    statistics_operator = register_without_gradient(
        f"{name}_statistics",
        of_logits.statistics_of_chunks,
        lambda x, *rest: empty_statistics(x, rest[-1]),
        opaque=True,
    )
    loss_operator = register(
        name,
        of_logits.loss_of_chunks,
        lambda x, *_: empty_loss(x),
        of_logits.gradients,
        lambda dloss, x, weight, bias, *rest: tuple(map(x.new_empty, _sizes(x, weight, bias, rest[-1]))),
        gradients_of=("x", "weight", "bias"),
        saves=kept_for_gradient,
        opaque=True,
    )

    def detached(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        return statistics_operator(x.detach(), weight.detach(), None if bias is None else bias.detach(), *rest)

    return Steps(detached, lambda *inputs: loss_operator(*inputs)[0])


class _OfLogits(NamedTuple):
    """What a path does with the logits of a chunk; its methods are what the operators do with all tokens."""

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
        start: int,
        vocab_size: int,
        softcap: float,
        ignore_index: int,
        with_sum: bool,
    ) -> Tensor:
        found = empty_statistics(x, with_sum)
        with _without_autocast(x):
            for rows in _chunks(x, chunk_size):
                logits = linear(x[rows], weight, bias)
                found[rows] = self.statistics(logits, target[rows], start, vocab_size, softcap, ignore_index, with_sum)
        return found

    def loss_of_chunks(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        target: Tensor,
        parts: Tensor,
        start: int,
        vocab_size: int,
        softcap: float,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        return self.loss(x, target, parts, start, vocab_size, softcap, ignore_index, smoothing, z_loss)

    def gradients(
        self,
        dloss: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        target: Tensor,
        whole: Tensor,
        start: int,
        vocab_size: int,
        softcap: float,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        needs: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = (start, vocab_size, softcap, ignore_index, smoothing, z_loss)
        sizes = _sizes(x, weight, bias, needs)
        dx = x.new_empty(sizes[0])
        dweight, dbias = (x.new_zeros(size, dtype=wide(x.dtype)) for size in sizes[1:])
        with _without_autocast(x):
            for rows in _chunks(x, chunk_size):
                dlogits = logits = linear(x[rows], weight, bias)
                self.gradient_into(dlogits, dloss[rows], logits, target[rows], whole[rows], *options)
                if needs[0]:
                    dx[rows] = dlogits @ weight
                if needs[1]:
                    _add_product(dweight, dlogits.t(), x[rows])
                if needs[2]:
                    dbias += dlogits.sum(dim=0, dtype=dbias.dtype)
        return dx, dweight.to(x.dtype), dbias.to(x.dtype)


def _chunks(x: Tensor, chunk_size: int) -> Iterator[slice]:
    return (slice(first, first + chunk_size) for first in range(0, x.shape[0], chunk_size))


def _without_autocast(x: Tensor) -> torch.autocast:
    """Logits are made twice, and backward may run outside of what changed their dtype in forward."""
    return torch.autocast(x.device.type, enabled=False)


def _sizes(x: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> list[list[int]]:
    """The sizes of the gradients that are wanted; [0] for the others."""
    given = zip((x, weight, bias), needs, strict=True)
    return [list(one.shape) if one is not None and needed else [0] for one, needed in given]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds ``a`` @ ``b`` to ``total``, of the same dtype or in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b  # other devices round the product of a chunk to its own dtype first
