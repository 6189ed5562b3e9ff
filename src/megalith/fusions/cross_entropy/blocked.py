"""The two steps of cross entropy on a CPU: formulas over blocks of rows, four passes over each, or compiled.

Per-row scalars are computed for all rows at once, outside the blocks. Here the shift m of a row is its largest logit,
including the target's: if the target dominates, the sum d over the others is small and stays accurate.

T tokens, n columns of this part of the vocabulary that are not padding.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from megalith.fusions.core.registration import register_without_gradient
from megalith.fusions.core.row_wise import RUNNERS, Runner
from megalith.fusions.core.rows import wide
from megalith.fusions.cross_entropy.formulas import (
    OPERATOR,
    SUM_SCALE,
    capped,
    finite_shift,
    gradients,
    loss_of_whole,
    num_true_columns,
    own_column,
    statistics_outputs,
)
from megalith.fusions.cross_entropy.options import Part, PartAndSum, PartAndTerms, Terms, part_and_terms
from megalith.fusions.cross_entropy.steps import steps_of_operators

__all__ = ["blocked", "compiled", "gradient_into", "statistics"]


def statistics(run: Runner, logits: Tensor, target: Tensor, *options: Unpack[PartAndSum]) -> Tensor:
    """The statistics of each row for this part, (m, d, x_y) or (m, d, x_y, s): [T, 3 or 4]."""
    found, part = statistics_outputs(logits, target, *options), Part(*options[:4])
    n = num_true_columns(logits.shape[-1], part)
    m, d, x_y, *s = found.unbind(dim=-1)
    for total in (d, x_y, *s):
        total.zero_()
    m.fill_(-math.inf)
    if found.numel() == 0 or n == 0:
        return found  # a part of padding only
    words = logits[:, :n]
    column, here = own_column(target, part.start, n)
    x_y.copy_(capped(words.gather(-1, column).to(found.dtype), part).masked_fill_(~here, 0.0).squeeze(-1))
    part, sums = part._replace(start=0), bool(s)  # what the formula holds, so that one code serves all parts

    def formula(x: Tensor, column: Tensor, here: Tensor, out: list[Tensor | None]) -> tuple[Tensor, ...]:
        x = capped(x, part)
        top = x.amax(dim=-1, keepdim=True)
        e = (x - finite_shift(top)).exp_()
        if torch.compiler.is_compiling():
            own = column.to(torch.int32).masked_fill(~here, -1)
            columns = torch.arange(n, dtype=torch.int32, device=x.device)
            e = e.masked_fill(columns == own, 0.0)  # fuses into one pass, unlike a scatter
        elif n == part.vocab_size:  # all targets that are not ignored are here
            e.scatter_(-1, column, 0.0)
        else:
            e.scatter_(-1, column, e.gather(-1, column).masked_fill_(here, 0.0))
        return top.squeeze(-1), e.sum(dim=-1), *([(x * SUM_SCALE).sum(dim=-1)] if sums else [])

    run.widened_by_blocks(formula, (words, column, here), (m, d, *s), acc=found.dtype)
    return found


def gradient_into(
    run: Runner,
    dlogits: Tensor,
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    whole: Tensor,
    *options: Unpack[PartAndTerms],
) -> None:
    """Fills ``dlogits``, which may be ``logits`` itself; 0 in ignored rows and in padding."""
    part, terms = part_and_terms(*options)
    n = num_true_columns(logits.shape[-1], part)
    words = logits[:, :n]
    if words.numel():
        column, here = own_column(target, part.start, n)
        shift, factor, at_target, from_all = _of_rows(dloss, whole, part, terms)
        at_target = (at_target - from_all) * _slope(words.gather(-1, column).to(whole.dtype), part)
        part = part._replace(start=0)  # so that one code serves all parts

        def formula(
            x: Tensor, shift: Tensor, factor: Tensor, from_all: Tensor, out: list[Tensor | None]
        ) -> tuple[Tensor]:
            e = (capped(x, part) - shift).exp_()
            if part.softcap == math.inf and not terms.smoothing:
                return (torch.mul(e, factor, out=out[0]),)
            return (e.mul_(factor).sub_(from_all).mul_(_slope(x, part)),)

        result = dlogits[:, :n]
        run.widened_by_blocks(formula, (words, shift, factor, from_all), (result,), acc=wide(logits.dtype))
        own = here.squeeze(-1).nonzero().squeeze(-1)  # scatter_ would need a widened copy of 16-bit results
        result.index_put_((own, column[own, 0]), at_target[own, 0].to(result.dtype))
    dlogits[:, n:] = 0.0
    dlogits.index_fill_(0, (target == part.ignore_index).nonzero().squeeze(-1), 0.0)  # even if logits are NaN there


def _of_rows(dloss: Tensor, whole: Tensor, part: Part, terms: Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row, [T, 1]: shift, factor of exp(x - shift), gradient at the target, and smoothing term of each column."""
    m, d, x_y = (one.unsqueeze(-1) for one in whole.unbind(-1)[:3])
    smoothing, z_loss = terms
    g = dloss.to(whole.dtype).unsqueeze(-1)
    t = m - x_y
    near, far = torch.exp(t.clamp(max=0.0)), torch.exp(-torch.relu(t))
    total = d * near + far
    k, p_y = near / total, far / total
    slope_of_lse = 2.0 * z_loss * (torch.where(t > 0.0, m, x_y) + torch.log(total)) if z_loss else 0.0
    at_target = g * (p_y * (smoothing + slope_of_lse) - (1.0 - smoothing) * d * k)
    return finite_shift(m), g * k * (1.0 + slope_of_lse), at_target, g * (smoothing / part.vocab_size)


def _slope(raw: Tensor, part: Part) -> Tensor | float:
    """Derivative of the capped logit with respect to the raw one."""
    return (
        1.0 if part.softcap == math.inf else torch.cosh(raw / part.softcap).reciprocal_().square_()
    )  # 1 - tanh^2 would lose precision by cancellation


def _gradient(
    run: Runner, dloss: Tensor, logits: Tensor, target: Tensor, whole: Tensor, *options: Unpack[PartAndTerms]
) -> tuple[Tensor]:
    (dlogits,) = gradients(dloss, logits, target, whole, *options)
    gradient_into(run, dlogits, dloss, logits, target, whole, *options)
    return (dlogits,)


blocked, compiled = (
    steps_of_operators(
        register_without_gradient(
            f"cross_entropy_statistics_{path}", partial(statistics, run), statistics_outputs, opaque=True
        ),
        OPERATOR.register(f"cross_entropy_{path}", loss_of_whole, partial(_gradient, run), opaque=True),
    )
    for path, run in RUNNERS.items()
)
