"""Formulas of ``vocab_parallel``: the statistics of each part of the vocabulary, and loss and gradient from them.

For a row with logits x and target y, the statistics of a part of the vocabulary are

    m   = a shift, at least the largest x_v with v != y      d = sum over v != y of exp(x_v - m)
    x_y = the target's logit, 0 if another part holds it     s = 2^-24 sum over v of x_v, for label smoothing

The factor 2^-24 is exact, and keeps sums of values near the float32 maximum from overflowing.
Parts are merged like log-sum-exps. The target is excluded from the sum, so nothing cancels when it dominates:

    t = m - x_y,  p = min(t, 0),  q = max(t, 0)
    ce  = q + log(d exp(p) + exp(-q))            = -log softmax(x)_y
    lse = max(m, x_y) + log(d exp(p) + exp(-q))  = log sum over v of exp(x_v)
    dce/dx_v = exp(x_v - m) k,  dce/dx_y = -d k,  with k = exp(p) / (d exp(p) + exp(-q))

T tokens, n columns of this part, R parts. Statistics are rows of 3, or 4 with s; all in float32, or float64.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from typing import Unpack

import torch
from torch import Tensor

from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import fresh_like, wide
from megalith.fusions.cross_entropy.options import Part, PartAndSum, PartAndTerms, Terms, part_and_terms
from megalith.fusions.cross_entropy.steps import Steps

__all__ = [
    "OPERATOR",
    "SUM_SCALE",
    "capped",
    "empty_loss",
    "empty_statistics",
    "finite_shift",
    "gradients",
    "kept_for_gradient",
    "loss_of_whole",
    "num_true_columns",
    "own_column",
    "reference",
    "statistics_outputs",
]

SUM_SCALE = 2.0**-24  # for sums over the vocabulary, which has at most 2^24 entries


def num_true_columns(num_columns: int, part: Part) -> int:
    """The number of columns in a part that belong to the vocabulary, excluding padding."""
    return min(max(part.vocab_size - part.start, 0), num_columns)


def _statistics(logits: Tensor, target: Tensor, part: Part, with_sum: bool) -> Tensor:
    """The statistics of each row for a part [T, n]: (m, d, x_y) or, ``with_sum``, (m, d, x_y, s) -> [T, 3 or 4]."""
    x = capped(_true_logits(logits, part), part)
    sums = [(x * SUM_SCALE).sum(dim=-1)] if with_sum else []
    if x.shape[-1] == 0:
        x = torch.nn.functional.pad(x, (0, 1), value=-math.inf)  # a part of padding only
    column, here = own_column(target, part.start, x.shape[-1])
    at_target = x.gather(-1, column)
    others = x.scatter(-1, column, at_target.masked_fill(here, -math.inf))
    m = others.detach().amax(dim=-1, keepdim=True)
    d = torch.exp(others - finite_shift(m)).sum(dim=-1)
    x_y = at_target.masked_fill(~here, 0.0).squeeze(-1)
    return torch.stack((m.squeeze(-1), d, x_y, *sums), dim=-1)


def _merged(parts: Tensor, target: Tensor, part: Part) -> Tensor:
    """Merges the statistics [R, T, 3 or 4] of all parts into those of the whole vocabulary [T, 3 or 4].

    A target outside the vocabulary gets the logit NaN, so that its loss is NaN.
    """
    m, d, *sums = parts.unbind(-1)  # [R, T] each
    top = m.amax(dim=0)
    d = (d * torch.exp(m - finite_shift(top))).sum(dim=0)
    x_y, *s = (one.sum(dim=0) for one in sums)
    outside = ((target < 0) | (target >= part.vocab_size)) & (target != part.ignore_index)
    # softmax of an infinite logit is NaN
    return torch.stack((top, d, x_y.masked_fill(outside | (x_y == math.inf), math.nan), *s), dim=-1)


def _loss_of(whole: Tensor, target: Tensor, part: Part, terms: Terms) -> Tensor:
    """The loss of each row, [T], from the statistics of the whole vocabulary; 0 for ignored rows."""
    m, d, x_y, *s = whole.unbind(-1)
    smoothing, z_loss = terms
    t = m - x_y
    q = torch.relu(t)
    # exp(-q) is 1 whenever d exp(p) may be small
    log_sum = torch.log1p(d * torch.exp(t.clamp(max=0.0)) + torch.expm1(-q))
    loss = q + log_sum
    lse = torch.where(t > 0.0, m, x_y) + log_sum
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * (lse - s[0] / (part.vocab_size * SUM_SCALE))
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(target == part.ignore_index, 0.0)


def _true_logits(logits: Tensor, part: Part) -> Tensor:
    """The columns without padding, in float32 or wider."""
    return logits[:, : num_true_columns(logits.shape[-1], part)].to(wide(logits.dtype))


def capped(x: Tensor, part: Part) -> Tensor:
    """The logits after the softcap, if any."""
    return x if part.softcap == math.inf else part.softcap * torch.tanh(x / part.softcap)


def own_column(target: Tensor, start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """The target's column [T, 1], clamped to a valid one if another part holds it; and whether it is in this part."""
    here = (target >= start) & (target < start + num_columns)
    return (target - start).clamp(0, num_columns - 1).unsqueeze(-1), here.unsqueeze(-1)


def finite_shift(m: Tensor) -> Tensor:
    """``m``, or 0 where it is -inf, since -inf - -inf is NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def empty_statistics(x: Tensor, with_sum: bool) -> Tensor:
    """Allocates the statistics of the rows of ``x``."""
    return x.new_empty(x.shape[0], 4 if with_sum else 3, dtype=wide(x.dtype))


def empty_loss(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates the loss of each row of ``x``, and the statistics that its gradient needs: (m, d, x_y)."""
    return x.new_empty(x.shape[0], dtype=wide(x.dtype)), x.new_empty(x.shape[0], 3, dtype=wide(x.dtype))


def statistics_outputs(logits: Tensor, target: Tensor, *options: Unpack[PartAndSum]) -> Tensor:
    """Allocates the statistics of a part."""
    return empty_statistics(logits, PartAndSum(*options).with_sum)


def _outputs(
    logits: Tensor,
    target: Tensor,
    parts: Tensor,
    *options: Unpack[PartAndTerms],
) -> tuple[Tensor, Tensor]:
    return empty_loss(logits)


def gradients(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    whole: Tensor,
    *options: Unpack[PartAndTerms],
) -> tuple[Tensor]:
    """Allocates the gradient of the logits."""
    return (fresh_like(logits),)


def kept_for_gradient(outputs: tuple[Tensor, ...], *inputs: object) -> tuple[object, ...]:
    """(*tensors, target, parts, *part, *terms) with ``parts`` replaced by the statistics of the whole vocabulary."""
    tensors, options = inputs[:-7], inputs[-6:]
    return (*tensors, outputs[1], *options)


OPERATOR = Operator(_outputs, gradients, of=("logits",), saves=kept_for_gradient)


def _reference_statistics(logits: Tensor, target: Tensor, *options: Unpack[PartAndSum]) -> Tensor:
    """The statistics of this part, differentiable."""
    part = Part(*options[:4])
    ignored = (target == part.ignore_index).unsqueeze(-1)
    counted = logits.masked_fill(ignored, 0.0)  # NaN times 0 would be NaN, including in the gradient
    return _statistics(counted, target, part, PartAndSum(*options).with_sum)


def _reference_loss(logits: Tensor, target: Tensor, parts: Tensor, *options: Unpack[PartAndTerms]) -> Tensor:
    """The loss, whose gradient flows through ``parts``."""
    part, terms = part_and_terms(*options)
    return _loss_of(_merged(parts, target, part), target, part, terms)


reference = Steps(_reference_statistics, _reference_loss)


def loss_of_whole(
    logits: Tensor, target: Tensor, parts: Tensor, *options: Unpack[PartAndTerms]
) -> tuple[Tensor, Tensor]:
    """The loss, and the statistics (m, d, x_y) of the whole vocabulary that its gradient needs."""
    part, terms = part_and_terms(*options)
    whole = _merged(parts, target, part)
    return _loss_of(whole, target, part, terms), whole[:, :3].clone()
