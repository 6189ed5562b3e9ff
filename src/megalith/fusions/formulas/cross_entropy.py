"""Cross entropy of rows whose vocabulary may be split: what a rank says of its part, and loss and gradient from that.

Of a row with logits x and target y, a part of the vocabulary says

    m   = a shift, at least the largest x_v with v != y      d = sum over v != y of exp(x_v - m)
    x_y = the target's logit, 0 where another part holds it    s = sum over v of x_v, for label smoothing

Parts merge as log-sum-exps do. The target stays out of the sum, so nothing cancels where it dominates:

    t = m - x_y,  p = min(t, 0),  q = max(t, 0)
    ce  = q + log(d exp(p) + exp(-q))            = -log softmax(x)_y
    lse = max(m, x_y) + log(d exp(p) + exp(-q))  = log sum over v of exp(x_v)
    dce/dx_v = exp(x_v - m) k,  dce/dx_y = -d k,  with k = exp(p) / (d exp(p) + exp(-q))

T tokens, n columns of this part, R parts. Statistics are rows of 3, or 4 with s; all in float32, or float64.
"""

import math

import torch
from torch import Tensor

from megalith.fusions.formulas.rows import wide

__all__ = ["empty_loss", "empty_statistics", "gradient", "loss_of", "merged", "num_true_columns", "statistics"]


def num_true_columns(num_columns: int, start: int, vocab_size: int) -> int:
    """How many of a part's columns are words of the vocabulary, and not padding."""
    return min(max(vocab_size - start, 0), num_columns)


def empty_statistics(x: Tensor, with_sum: bool) -> Tensor:
    """Fresh memory for the statistics of the rows of ``x``."""
    return x.new_empty(x.shape[0], 4 if with_sum else 3, dtype=wide(x.dtype))


def empty_loss(x: Tensor) -> tuple[Tensor, Tensor]:
    """Fresh memory for the loss of each row of ``x``, and for what its gradient needs: (m, d, x_y)."""
    return x.new_empty(x.shape[0], dtype=wide(x.dtype)), x.new_empty(x.shape[0], 3, dtype=wide(x.dtype))


def statistics(logits: Tensor, target: Tensor, start: int, vocab_size: int, softcap: float, with_sum: bool) -> Tensor:
    """What a part [T, n] says of each row: (m, d, x_y) or, ``with_sum``, (m, d, x_y, s) -> [T, 3 or 4]."""
    x = _true_logits(logits, start, vocab_size)
    x = x if softcap == math.inf else softcap * torch.tanh(x / softcap)
    sums = [x.sum(dim=-1)] if with_sum else []
    if x.shape[-1] == 0:
        x = torch.nn.functional.pad(x, (0, 1), value=-math.inf)  # a part of padding only
    column, here = _own_column(target, start, x.shape[-1])
    at_target = x.gather(-1, column)
    others = x.scatter(-1, column, at_target.masked_fill(here, -math.inf))
    m = others.detach().amax(dim=-1, keepdim=True)
    d = torch.exp(others - _finite_shift(m)).sum(dim=-1)
    x_y = at_target.masked_fill(~here, 0.0).squeeze(-1)
    return torch.stack((m.squeeze(-1), d, x_y, *sums), dim=-1)


def merged(parts: Tensor, target: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """The statistics [R, T, 3 or 4] of all parts as those of the whole vocabulary [T, 3 or 4].

    A target outside of the vocabulary has the logit NaN, so that it is not taken for a loss.
    """
    m, d, *sums = parts.unbind(-1)  # [R, T] each
    top = m.amax(dim=0)
    d = (d * torch.exp(m - _finite_shift(top))).sum(dim=0)
    x_y, *s = (one.sum(dim=0) for one in sums)
    outside = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    # an infinite logit is NaN to softmax
    return torch.stack((top, d, x_y.masked_fill(outside | (x_y == math.inf), math.nan), *s), dim=-1)


def loss_of(
    whole: Tensor, target: Tensor, vocab_size: int, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    """The loss of each row, [T], from the statistics of the whole vocabulary; 0 for rows that are ignored."""
    m, d, x_y, *s = whole.unbind(-1)
    t = m - x_y
    q = torch.relu(t)
    # exp(-q) is 1 wherever d exp(p) may be small
    log_sum = torch.log1p(d * torch.exp(t.clamp(max=0.0)) + torch.expm1(-q))
    loss = q + log_sum
    lse = torch.where(t > 0.0, m, x_y) + log_sum
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * (lse - s[0] / vocab_size)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(target == ignore_index, 0.0)


def gradient(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    whole: Tensor,
    start: int,
    vocab_size: int,
    softcap: float,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """The gradient of a part's logits, [T, n], in float32 or float64; 0 in rows that are ignored and in padding."""
    x = _true_logits(logits, start, vocab_size)
    n, num_columns = x.shape[-1], logits.shape[-1]
    if n == 0:
        return torch.zeros_like(logits)
    raw, x = x, x if softcap == math.inf else softcap * torch.tanh(x / softcap)
    m, d, x_y = (one.unsqueeze(-1) for one in whole.unbind(-1)[:3])
    g = dloss.to(x.dtype).unsqueeze(-1)
    t = m - x_y
    near, far = torch.exp(t.clamp(max=0.0)), torch.exp(-torch.relu(t))
    total = d * near + far
    k, p_y = near / total, far / total
    slope_of_lse = 2.0 * z_loss * (torch.where(t > 0.0, m, x_y) + torch.log(total)) if z_loss else 0.0
    dx = (x - _finite_shift(m)).exp_().mul_(g * k * (1.0 + slope_of_lse))
    at_target = g * (p_y * (smoothing + slope_of_lse) - (1.0 - smoothing) * d * k)
    column, here = _own_column(target, start, n)
    dx.scatter_(-1, column, torch.where(here, at_target, dx.gather(-1, column)))
    if smoothing:
        dx -= g * (smoothing / vocab_size)
    if softcap != math.inf:
        dx *= torch.cosh(raw / softcap).reciprocal().square()  # 1 - tanh^2 would cancel
    dx[target == ignore_index] = 0.0  # whatever the logits are there
    return dx if n == num_columns else torch.nn.functional.pad(dx, (0, num_columns - n))


def _true_logits(logits: Tensor, start: int, vocab_size: int) -> Tensor:
    """The columns that are words, in float32 or wider."""
    return logits[:, : num_true_columns(logits.shape[-1], start, vocab_size)].to(wide(logits.dtype))


def _own_column(target: Tensor, start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """The target's column [T, 1], any one where another part holds it; and whether it is here."""
    here = (target >= start) & (target < start + num_columns)
    return (target - start).clamp(0, num_columns - 1).unsqueeze(-1), here.unsqueeze(-1)


def _finite_shift(m: Tensor) -> Tensor:
    """``m``, or 0 where there is nothing to shift: -inf - -inf is NaN."""
    return m.masked_fill(m == -math.inf, 0.0)
