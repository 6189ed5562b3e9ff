"""How a token's logits determine its experts and their weights, as in published routers.

    softmax      chooses by the logits;  weights softmax over the chosen K, or, with use_pre_softmax, over all E
    sigmoid      scores q = sigmoid(logit), and sqrtsoftplus q = sqrt(log(1 + exp(logit))): chooses by q + bias;
                 weights q of the chosen, divided by their sum plus 1e-20 if K > 1
    groups       a group's score is the sum of its group_score_topk best scores; only the experts of the
                 best group_topk groups can be chosen

DeepSeek-V2, arXiv:2405.04434 (groups); DeepSeek-V3, arXiv:2412.19437 (sigmoid and bias).

Scores are monotonic in the logits, so without bias and groups the choice uses the logits themselves: it is exact, and
the same on every path. Otherwise it uses float32 scores, whose last digit may differ between paths. Ties go to the
lower index; NaN ranks like inf.
"""

import torch
from torch import Tensor

from megalith.torch_compat.tensors import is_intercepted

__all__ = ["EPSILON", "FAR", "largest", "score_of", "select", "slope_of", "softmax_of_best", "weigh"]

EPSILON = 1e-20  # added to sums of scores, which may all be zero
# below this, log(1 + exp(x)) equals exp(x) in float64; exp(x / 2), its root, does not underflow where exp(x) does
FAR = -40.0


def select(
    x: Tensor, bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, group_score_topk: int
) -> Tensor:
    """The experts chosen by logits ``x`` [T, E]: [T, K], int64, best first."""
    if bias is None and num_groups == 1:
        return largest(x, topk)
    value = x if score == "softmax" else torch.softmax(x, dim=-1) if score == "pre_softmax" else score_of(x, score)
    value = value if bias is None else value + bias.to(x.dtype)
    by = x if bias is None else value
    if num_groups == 1:
        return largest(by, topk)
    of_groups = len(x) * num_groups, x.shape[1] // num_groups
    best = value.reshape(of_groups).gather(1, largest(by.reshape(of_groups), group_score_topk)).unbind(dim=1)
    worth = sum(best[1:], best[0]).view(len(x), num_groups)  # added in sequence, so that all paths round alike
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
    """softmax over rows whose largest entry comes first; torch.softmax is slow on very short rows."""
    e = torch.exp(chosen - chosen[:, :1].detach())
    return e / e.sum(dim=-1, keepdim=True)


def score_of(x: Tensor, score: str) -> Tensor:
    """The elementwise score of each logit: sigmoid or sqrtsoftplus."""
    if score == "sigmoid":
        rare = torch.sigmoid(torch.where(x < 0, x, -x))  # at most 1/2, so that the slope s (1 - s) stays accurate
        return torch.where(x < 0, rare, 1.0 - rare)
    near = torch.nn.functional.softplus(x.clamp_min(FAR), threshold=50.0).sqrt()
    return torch.where(x < FAR, torch.exp(0.5 * x), near)


def slope_of(x: Tensor, q: Tensor, score: str) -> Tensor:
    """The derivative of ``score_of`` at ``x``, given the score ``q``."""
    if score == "sigmoid":
        return q * torch.sigmoid(-x)
    return torch.where(x < FAR, 0.5 * q, torch.sigmoid(x) / (2.0 * q))


def largest(values: Tensor, k: int, among: Tensor | None = None) -> Tensor:
    """Columns of the ``k`` largest values of each row, among those marked in ``among`` (k or more); ties to the lower.

    torch.topk does not specify which of several equal entries it returns; here it is given distinct integers.
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
    if values.device.type != "cpu" or type(key) is not Tensor or is_intercepted():  # numpy cannot read those
        return key.topk(k, dim=-1).indices
    key.numpy().sort(axis=-1)  # for up to 256 experts faster than a partition, and five times faster than torch.topk
    return key[:, E - k :].flip(-1).bitwise_and_(2**32 - 1).neg_().add_(E - 1)


def _ordered(values: Tensor) -> Tensor:
    """int32 keys that sort like the float32 ``values``, which contain no NaN; keys of 0 and -0 are equal."""
    bits = values.view(torch.int32)
    sign = bits >> 31
    return (bits & (2**31 - 1)).bitwise_xor_(sign).sub_(sign)
