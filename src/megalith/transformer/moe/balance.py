"""Load balancing of experts: losses on a router's logits, and biases and offsets that are updated from its choices.

    switch loss  L = E / (K T T') * sum over e of P_e C_e      Fedus et al. 2021, arXiv:2101.03961; 1 if balanced
                 P_e  sum over T tokens of their scores, normalized per token to sum to 1 over all E
                 C_e  how many of T' tokens chose e, with bias and groups, before any is dropped
    z-loss       Z = 1/T * sum over t of (logsumexp over e of logit_te)^2          Zoph et al. 2022, arXiv:2202.08906
    expert bias  b_e += rate * (sign(mean load - load_e) - the mean of these)      Wang et al. 2024, arXiv:2408.15664
    offsets      alpha_t = midway between the K-th and the (K+1)-th largest of logit_te - offset_e over e;
                 the new offset_e = the (T K / E + 1)-th largest of logit_te - alpha_t over t, so that T K / E exceed it

Each rank holds part of the tokens. C and the numbers of tokens are summed over ranks and have no gradient; P covers
this rank's tokens only, so that the losses of all ranks, and their gradients, add up to L. Padding is never counted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.fusions import compute_routing_scores_for_aux_loss
from megalith.fusions.routing.topk_router import ScoreFunction
from megalith.transformer.moe.routing import of_real_tokens

__all__ = [
    "LoadMetrics",
    "choices_of_sequences",
    "load_metrics",
    "quantile_offsets",
    "scores_of_sequences",
    "switch_loss",
    "update_expert_bias_",
    "update_quantile_offsets_",
    "with_gradient_of",
    "z_loss",
]


def choices_of_sequences(indices: Tensor, num_experts: int, num_sequences: int, real: Tensor) -> Tensor:
    """Returns int64 [B, E + 1]: how often each sequence's tokens chose each expert, and its number of tokens.

    Args:
        indices: int64 [T, K]; token t belongs to sequence t mod B, and E + e counts as a choice of e.
        num_experts: E.
        num_sequences: B.
        real: bool [T].
    """
    sequence = torch.arange(len(indices), device=indices.device) % num_sequences
    chosen = torch.nn.functional.pad(indices % num_experts, (0, 1), value=num_experts)  # [T, K + 1]
    cells = (sequence[:, None] * (num_experts + 1) + chosen).flatten()
    ones = of_real_tokens(torch.ones_like(chosen), real, 0)
    counts = cells.new_zeros(num_sequences * (num_experts + 1))
    return counts.scatter_add_(0, cells, ones.flatten()).view(num_sequences, -1)


def scores_of_sequences(
    logits: Tensor, top_k: int, score_function: ScoreFunction, num_sequences: int, real: Tensor
) -> Tensor:
    """Returns [B, E], float32 or wider: the sum of each sequence's token scores, which sum to 1 over all experts."""
    _, scores = compute_routing_scores_for_aux_loss(logits, top_k, score_function)
    return of_real_tokens(scores, real, 0.0).view(-1, num_sequences, logits.shape[1]).sum(dim=0)


def switch_loss(scores: Tensor, num_scored: Tensor, choices: Tensor, top_k: int) -> Tensor:
    """Returns L for each row, [...]; 0 for a row without tokens.

    Args:
        scores: P, [..., E].
        num_scored: T, [...]: the number of scored tokens on all ranks.
        choices: int64 [..., E + 1]: C, and in the last column T', the number of tokens that it counts.
        top_k: K.
    """
    E = scores.shape[-1]
    pairs = top_k * num_scored.clamp_min(1) * choices[..., E].clamp_min(1)
    return (scores * choices[..., :E]).sum(dim=-1) * E / pairs


def z_loss(logits: Tensor, real: Tensor, num_tokens: Tensor) -> Tensor:
    """Returns this rank's part of Z, a scalar; ``num_tokens`` is the number on all ranks."""
    squares = of_real_tokens(logits.logsumexp(dim=1).square(), real, 0.0)
    return squares.sum() / num_tokens.clamp_min(1)


def with_gradient_of(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """Returns ``x`` unchanged; its backward also runs the backward of the scalar ``scale * loss``.

    This lets any pipeline stage have a loss of its own.
    """
    y: Tensor = _WithGradientOf.apply(x, loss, scale)
    return y


@torch.no_grad()
def update_expert_bias_(bias: Tensor, tokens_per_expert: Tensor, rate: float) -> None:
    """Moves ``bias`` [E] toward even loads, once per applied step, given the loads [E] of all tokens of the step.

    The increments sum to zero, so that the mean bias does not drift.
    """
    loads = tokens_per_expert.to(bias.dtype)
    steps = torch.sign(loads.mean() - loads)
    bias.add_(steps - steps.mean(), alpha=rate)


@torch.no_grad()
def quantile_offsets(logits: Tensor, offsets: Tensor, top_k: int, real: Tensor) -> Tensor:
    """Returns [E + 1] in the dtype of ``logits``: offsets that balance these tokens, then 1; zeros if none is real.

    The results of micro-batches and ranks are summed; the last entry counts them.

    Args:
        logits: [T, E], of the micro-batch's tokens on all ranks that share it.
        offsets: [E], the current ones, with which experts were chosen.
        top_k: K, less than E. If E does not divide T K, an expert's share is rounded down.
        real: bool [T].
    """
    if not len(logits):
        return logits.new_zeros(logits.shape[1] + 1)
    E = logits.shape[1]
    best = (logits - offsets).topk(top_k + 1, dim=1).values
    # with the (K+1)-th value itself many margins of e would equal its old offset, and offsets would stall too early
    borders = best[:, -2:].mean(dim=1, keepdim=True)  # [T, 1]
    margins = of_real_tokens(logits - borders, real, -torch.inf).sort(dim=0, descending=True).values
    share = real.sum() * top_k // E  # stays on the device, which avoids host synchronization
    estimate = torch.nn.functional.pad(margins.index_select(0, share[None])[0], (0, 1), value=1.0)
    return torch.where(real.any(), estimate, 0.0)


@torch.no_grad()
def update_quantile_offsets_(offsets: Tensor, estimates: Tensor, decay: float) -> None:
    """Sets ``offsets`` [E] to decay * old + (1 - decay) * (mean estimate, less its mean over the experts).

    Called once per applied step; ``estimates`` [E + 1] is the sum of ``quantile_offsets`` over all micro-batches and
    ranks. Without any estimate the offsets are unchanged.
    """
    mean = estimates[:-1] / estimates[-1].clamp_min(1.0)
    moved = decay * offsets + (1.0 - decay) * (mean - mean.mean()).to(offsets.dtype)
    offsets.copy_(torch.where(estimates[-1] > 0, moved, offsets))


@dataclass(frozen=True)
class LoadMetrics:
    """Metrics of how even the loads of a layer's experts are.

    Attributes:
        max_violation: the largest load divided by the mean, less 1 (arXiv:2408.15664): 0 if loads are even, E / K - 1
            if all tokens chose the same experts.
        entropy: of the experts' shares of all choices, in nats: log E if loads are even.
        dead_experts: how many experts no token chose.
    """

    max_violation: float
    entropy: float
    dead_experts: int


def load_metrics(tokens_per_expert: Tensor) -> LoadMetrics:
    """Returns the metrics of integer loads [E]; 0, 0 and E if there were no tokens."""
    loads = tokens_per_expert.double()
    total = loads.sum()
    shares = loads / total.clamp_min(1.0)
    violation = shares.max() * len(loads) - 1.0 if total > 0 else 0.0
    return LoadMetrics(float(violation), float(-torch.xlogy(shares, shares).sum()), int((loads == 0).sum()))


class _WithGradientOf(torch.autograd.Function):
    """Returns the first of two inputs; in backward, the gradient of the second is ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return dy, torch.full_like(loss, ctx.scale), None
