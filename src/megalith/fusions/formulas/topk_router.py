"""Formulas of ``megalith.fusions.fused_topk_router``, whose head states them; T tokens, E experts, K chosen."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.fusions.formulas.routing_scores import EPSILON, score_of, select, slope_of, softmax_of_best, weigh
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import Operator

__all__ = ["OPERATOR", "Choice", "blocked", "gradients", "outputs", "reference"]


class Choice(NamedTuple):
    """How experts are chosen and weighed; the last operands of the operator."""

    topk: int
    score: str  # "pre_softmax" beside the names of score functions
    num_groups: int
    group_topk: int
    scale: float


def reference(logits: Tensor, expert_bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """probs, indices and tokens_per_expert."""
    topk, score, num_groups, group_topk, scale = Choice(*options)
    x = logits.to(wide(logits.dtype))
    indices = select(x.detach(), expert_bias, topk, score, num_groups, group_topk)
    chosen = indices.flatten()
    num_tokens = chosen.new_zeros(logits.shape[1]).scatter_add_(0, chosen, torch.ones_like(chosen))
    return weigh(x, indices, score, scale).to(logits.dtype), indices, num_tokens


def _gradient_of(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> Tensor:
    """dlogits [T, E]."""
    x = logits.to(wide(logits.dtype))
    g = dprobs.to(x.dtype) * scale
    if score == "pre_softmax":
        p = torch.softmax(x, dim=-1)
        inner = (g * p.gather(1, indices)).sum(dim=-1, keepdim=True)
        return (p * (torch.zeros_like(p).scatter_(1, indices, g) - inner)).to(logits.dtype)
    chosen = x.gather(1, indices)
    if score == "softmax":
        w = softmax_of_best(chosen)
        d = w * (g - (g * w).sum(dim=-1, keepdim=True))
    else:
        q = score_of(chosen, score)
        total = q.sum(dim=-1, keepdim=True) + EPSILON
        dq = g if q.shape[1] == 1 else (g - (g * q / total).sum(dim=-1, keepdim=True)) / total
        d = dq * slope_of(chosen, q, score)
    return torch.zeros_like(logits).scatter_(1, indices, d.to(logits.dtype))


def outputs(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for probs [T, K], indices [T, K] and tokens_per_expert [E]."""
    probs = logits.new_empty(logits.shape[0], topk)
    indices = torch.empty_like(probs, dtype=torch.int64)
    return probs, indices, indices.new_empty(logits.shape[1])


def gradients(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> tuple[Tensor]:
    """Memory for dlogits [T, E]."""
    return (logits.new_empty(logits.shape),)


def _saves(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    logits, _, *options = inputs
    _, indices, _ = outputs
    choice = Choice(*options)
    return logits, indices, choice.score, choice.scale


OPERATOR = Operator(outputs, gradients, of=("logits",), saves=_saves)


def _forward(logits: Tensor, expert_bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    probs, indices, num_tokens = outputs(logits, expert_bias, *options)

    def formula(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference(logits, expert_bias, *options)

    by_blocks(formula, (logits,), (probs, indices), (num_tokens.zero_(),))
    return probs, indices, num_tokens


def _backward(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> tuple[Tensor]:
    (dlogits,) = gradients(dprobs, logits, indices, score, scale)

    def formula(dprobs: Tensor, logits: Tensor, indices: Tensor) -> tuple[Tensor]:
        return (_gradient_of(dprobs, logits, indices, score, scale),)

    by_blocks(formula, (dprobs, logits, indices), (dlogits,))
    return (dlogits,)


blocked = OPERATOR.register("topk_router_blocked", _forward, _backward, opaque=True)
