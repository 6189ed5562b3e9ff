"""Implements the formulas stated in ``aux_loss_scores``; T tokens, E experts."""

import torch
from torch import Tensor

from megalith.fusions.core.registration import Operator
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import fresh_like, wide
from megalith.fusions.routing.scores import EPSILON, largest, score_of, slope_of

__all__ = ["OPERATOR", "blocked", "compiled", "gradients", "outputs", "reference"]


def reference(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    """Returns the scores and the map."""
    x = logits.to(wide(logits.dtype))
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter_(1, largest(x.detach(), topk), True)
    if score == "softmax":
        return torch.softmax(x, dim=-1), chosen
    q = score_of(x, score)
    return q / (q.sum(dim=-1, keepdim=True) + EPSILON), chosen


def _gradient_of(dscores: Tensor, logits: Tensor, score: str) -> Tensor:
    """dlogits [T, E]."""
    x = logits.to(dscores.dtype)
    if score == "softmax":
        p = torch.softmax(x, dim=-1)
        dlogits: Tensor = torch.ops.aten._softmax_backward_data(dscores, p, -1, x.dtype)  # in one pass
        return dlogits.to(logits.dtype)
    q = score_of(x, score)
    total = q.sum(dim=-1, keepdim=True) + EPSILON
    dq = (dscores - (dscores * q / total).sum(dim=-1, keepdim=True)) / total
    return (dq * slope_of(x, q, score)).to(logits.dtype)


def outputs(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    """Allocates scores [T, E] and routing_map [T, E]."""
    scores = fresh_like(logits, wide(logits.dtype))
    return scores, torch.empty_like(scores, dtype=torch.bool)


def gradients(dscores: Tensor, logits: Tensor, score: str) -> tuple[Tensor]:
    """Allocates dlogits [T, E]."""
    return (fresh_like(logits),)


def _saves(_: tuple[Tensor, ...], logits: Tensor, topk: int, score: str) -> tuple[object, ...]:
    return logits, score


OPERATOR = Operator(outputs, gradients, of=("logits",), saves=_saves)


def _forward(run: Runner, logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    results = outputs(logits, topk, score)
    run.by_blocks(lambda logits: reference(logits, topk, score), (logits,), results)
    return results


def _backward(run: Runner, dscores: Tensor, logits: Tensor, score: str) -> tuple[Tensor]:
    (dlogits,) = gradients(dscores, logits, score)
    run.by_blocks(lambda dscores, logits: (_gradient_of(dscores, logits, score),), (dscores, logits), (dlogits,))
    return (dlogits,)


blocked, compiled = register_row_wise(OPERATOR, "aux_loss_scores", _forward, _backward)
