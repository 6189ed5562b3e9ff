"""Which experts a token's logits choose, and what each is worth, as routers of the field define it.

    softmax      chooses by the logits;  weights softmax over the chosen K, or, use_pre_softmax, over all E
    sigmoid      scores q = sigmoid(logit), and sqrtsoftplus q = sqrt(log(1 + exp(logit))): chooses by q + bias;
                 weights q of the chosen, divided by their sum plus 1e-20 where K > 1
    groups       a group is worth the sum of its group_score_topk best scores; only the experts of the
                 best group_topk groups can be chosen

DeepSeek-V2, arXiv:2405.04434 (groups); DeepSeek-V3, arXiv:2412.19437 (sigmoid and bias).

Scores rise with the logits, so without bias and groups the choice is made on the logits themselves: it is exact, and
the same in every path. With them it is made on float32 scores, whose last digit may differ between paths. Of equal
values the lower expert is taken; NaN counts as inf.
"""

import torch
from torch import Tensor

from megalith.torch_compat import is_intercepted

__all__ = ["EPSILON", "FAR", "largest", "score_of", "select", "slope_of", "softmax_of_best", "weigh"]

EPSILON = 1e-20  # beside sums of scores, which may all be zero
# below, log(1 + exp(x)) is exp(x) to the last digit of float64, and its root is in range where it is not
FAR = -40.0


def select(
    x: Tensor, bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, group_score_topk: int
) -> Tensor:
    """The experts that logits ``x`` [T, E] choose: [T, K], int64, the best first."""
    if bias is None and num_groups == 1:
        return largest(x, topk)
    value = x if score == "softmax" else torch.softmax(x, dim=-1) if score == "pre_softmax" else score_of(x, score)
    value = value if bias is None else value + bias.to(x.dtype)
    by = x if bias is None else value
    if num_groups == 1:
        return largest(by, topk)
    of_groups = len(x) * num_groups, x.shape[1] // num_groups
    best = value.reshape(of_groups).gather(1, largest(by.reshape(of_groups), group_score_topk)).unbind(dim=1)
    worth = sum(best[1:], best[0]).view(len(x), num_groups)  # one after the other, so that every path rounds alike
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, largest(worth, group_topk), True)
    return largest(by, topk, among=kept.repeat_interleave(of_groups[1], dim=1))


def weigh(x: Tensor, indices: Tensor, score: str, scale: float) -> Tensor:
    """The weights [T, K] of the chosen experts, in the dtype of ``x``."""
    if score == "pre_softmax":
        return torch.softmax(x, dim=-1).gather(1, indices) * scale
    chosen = x.gather(1, indices)
    if score == "softmax":
        return softmax_of_best(chosen) * scale
    q = score_of(chosen, score)
    return (q if q.shape[1] == 1 else q / (q.sum(dim=-1, keepdim=True) + EPSILON)) * scale


def softmax_of_best(chosen: Tensor) -> Tensor:
    """softmax over rows whose greatest entry is the first; torch.softmax is slow on rows of a few."""
    e = torch.exp(chosen - chosen[:, :1].detach())
    return e / e.sum(dim=-1, keepdim=True)


def score_of(x: Tensor, score: str) -> Tensor:
    """The score of each logit by itself: sigmoid or sqrtsoftplus."""
    if score == "sigmoid":
        rare = torch.sigmoid(torch.where(x < 0, x, -x))  # at most a half, so that its slope s (1 - s) keeps its digits
        return torch.where(x < 0, rare, 1.0 - rare)
    near = torch.nn.functional.softplus(x.clamp_min(FAR), threshold=50.0).sqrt()
    return torch.where(x < FAR, torch.exp(0.5 * x), near)


def slope_of(x: Tensor, q: Tensor, score: str) -> Tensor:
    """The derivative of ``score_of`` at ``x``, where it is ``q``."""
    if score == "sigmoid":
        return q * torch.sigmoid(-x)
    return torch.where(x < FAR, 0.5 * q, torch.sigmoid(x) / (2.0 * q))


def largest(values: Tensor, k: int, among: Tensor | None = None) -> Tensor:
    """Columns of the ``k`` largest of each row, of those that ``among`` marks (k or more); of equal ones the lower.

    torch.topk leaves open which of equal entries it takes; here it is given whole numbers that all differ.
    """
    E = values.shape[1]
    values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if values.dtype == torch.float64:
        order = values.sort(dim=-1, descending=True, stable=True).indices
        if among is not None:
            order = order.gather(1, among.gather(1, order).int().sort(dim=-1, descending=True, stable=True).indices)
        return order[:, :k]
    key = _ordered(values).to(torch.int64).mul_(2**32).add_(torch.arange(E - 1, -1, -1, device=values.device))
    if among is not None:
        key = key.masked_fill_(~among, -(2**63))
    if values.device.type != "cpu" or type(key) is not Tensor or is_intercepted():  # there numpy could not read it
        return key.topk(k, dim=-1).indices
    key.numpy().sort(axis=-1)  # up to 256 experts faster than a partition, and five times faster than torch.topk
    return key[:, E - k :].flip(-1).bitwise_and_(2**32 - 1).neg_().add_(E - 1)


def _ordered(values: Tensor) -> Tensor:
    """int32 that order as the float32 ``values`` do, none of them NaN, and are equal where those are: 0 and -0."""
    bits = values.view(torch.int32)
    sign = bits >> 31
    return (bits & (2**31 - 1)).bitwise_xor_(sign).sub_(sign)
