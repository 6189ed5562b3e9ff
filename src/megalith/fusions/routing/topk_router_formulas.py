"""Implements the formulas stated in ``topk_router``; T tokens, E experts, K chosen."""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.registration import Operator
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import fresh_like, wide
from megalith.fusions.routing.scores import EPSILON, score_of, select, slope_of, softmax_of_best, weigh

__all__ = ["OPERATOR", "Choice", "blocked", "compiled", "gradients", "outputs", "reference"]


class Choice(NamedTuple):
    """How experts are chosen and weighted; the last operands of the operator."""

    topk: int
    score: str  # a score function, or "pre_softmax"
    num_groups: int
    group_topk: int
    group_score_topk: int
    scale: float


def reference(logits: Tensor, expert_bias: Tensor | None, *options: Unpack[Choice]) -> tuple[Tensor, Tensor, Tensor]:
    """probs, indices and tokens_per_expert."""
    topk, score, num_groups, group_topk, group_score_topk, scale = Choice(*options)
    x = logits.to(wide(logits.dtype))
    indices = select(x.detach(), expert_bias, topk, score, num_groups, group_topk, group_score_topk)
    chosen = indices.flatten()
    num_tokens = chosen.new_zeros(logits.shape[1]).scatter_add_(0, chosen, torch.ones_like(chosen))
    return weigh(x, indices, score, scale).to(logits.dtype), indices, num_tokens


def _gradient_of_all(dprobs: Tensor, logits: Tensor, indices: Tensor, scale: float) -> Tensor:
    """dlogits [T, E] for pre_softmax, where every expert contributes to the weights; not rounded."""
    x = logits.to(wide(logits.dtype))
    g, p = dprobs.to(x.dtype) * scale, torch.softmax(x, dim=-1)
    inner = (g * p.gather(1, indices)).sum(dim=-1, keepdim=True)
    return p * (torch.zeros_like(p).scatter_(1, indices, g) - inner)


def _gradient_of_chosen(dprobs: Tensor, chosen: Tensor, score: str, scale: float) -> Tensor:
    """The gradient of ``chosen``, the logits [T, K]; not rounded."""
    chosen = chosen.to(wide(chosen.dtype))
    g = dprobs.to(chosen.dtype) * scale
    if score == "softmax":
        w = softmax_of_best(chosen)
        return w * (g - (g * w).sum(dim=-1, keepdim=True))
    q = score_of(chosen, score)
    total = q.sum(dim=-1, keepdim=True) + EPSILON
    dq = g if q.shape[1] == 1 else (g - (g * q / total).sum(dim=-1, keepdim=True)) / total
    return dq * slope_of(chosen, q, score)


def outputs(
    logits: Tensor,
    expert_bias: Tensor | None,
    *options: Unpack[Choice],
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates probs [T, K], indices [T, K] and tokens_per_expert [E]."""
    probs = logits.new_empty(logits.shape[0], Choice(*options).topk)
    indices = torch.empty_like(probs, dtype=torch.int64)
    return probs, indices, indices.new_empty(logits.shape[1])


def gradients(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> tuple[Tensor]:
    """Allocates dlogits [T, E]."""
    return (fresh_like(logits),)


def _saves(
    outputs: tuple[Tensor, ...], logits: Tensor, expert_bias: Tensor | None, *options: Unpack[Choice]
) -> tuple[object, ...]:
    _, indices, _ = outputs
    choice = Choice(*options)
    return logits, indices, choice.score, choice.scale


OPERATOR = Operator(outputs, gradients, of=("logits",), saves=_saves)


def _forward(
    run: Runner, logits: Tensor, expert_bias: Tensor | None, *options: Unpack[Choice]
) -> tuple[Tensor, Tensor, Tensor]:
    probs, indices, num_tokens = outputs(logits, expert_bias, *options)

    def formula(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference(logits, expert_bias, *options)

    run.by_blocks(formula, (logits,), (probs, indices), (num_tokens.zero_(),))
    return probs, indices, num_tokens


def _backward(run: Runner, dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> tuple[Tensor]:
    (dlogits,) = gradients(dprobs, logits, indices, score, scale)

    def of_all(dprobs: Tensor, logits: Tensor, indices: Tensor) -> tuple[Tensor]:
        return (_gradient_of_all(dprobs, logits, indices, scale),)

    def of_chosen(dprobs: Tensor, chosen: Tensor) -> tuple[Tensor]:
        return (_gradient_of_chosen(dprobs, chosen, score, scale),)

    if score == "pre_softmax":
        run.by_blocks(of_all, (dprobs, logits, indices), (dlogits,))
        return (dlogits,)
    dchosen = torch.empty_like(dprobs, dtype=logits.dtype)
    run.by_blocks(of_chosen, (dprobs, logits.gather(1, indices)), (dchosen,))
    return (dlogits.zero_().scatter_(1, indices, dchosen),)


blocked, compiled = register_row_wise(OPERATOR, "topk_router", _forward, _backward)
