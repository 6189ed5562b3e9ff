"""What keeps the loads of experts even: losses on a router's logits, and biases and offsets that follow its choices.

    switch loss  L = E / (K T T') * sum over e of P_e C_e      Fedus et al. 2021, arXiv:2101.03961; 1 where balanced
                 P_e  sum over T tokens of their scores, each token's divided by their sum over all E
                 C_e  how many of T' tokens chose e, with bias and groups, before any is dropped
    z-loss       Z = 1/T * sum over t of (logsumexp over e of logit_te)^2          Zoph et al. 2022, arXiv:2202.08906
    expert bias  b_e += rate * (sign(mean load - load_e) - the mean of these)      Wang et al. 2024, arXiv:2408.15664
    offsets      alpha_t = midway between the K-th and the (K+1)-th largest of logit_te - offset_e over e;
                 the new offset_e = the (T K / E + 1)-th largest of logit_te - alpha_t over t: T K / E are above it

Ranks hold parts of the tokens: C and the numbers of tokens are summed over ranks and have no gradient; P is of this
rank's tokens alone, so that the losses of the ranks, and their gradients, add up to L. Tokens of padding count nowhere.
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
    """int64 [B, E + 1]: how often the tokens of each sequence chose each expert, and how many tokens it has.

    Args:
        indices: int64 [T, K], where token t is of sequence t mod B; E + e is a choice of e.
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
    """[B, E], float32 or wider: for each sequence the sum of its tokens' scores, which are 1 over all experts."""
    _, scores = compute_routing_scores_for_aux_loss(logits, top_k, score_function)
    return of_real_tokens(scores, real, 0.0).view(-1, num_sequences, logits.shape[1]).sum(dim=0)


def switch_loss(scores: Tensor, num_scored: Tensor, choices: Tensor, top_k: int) -> Tensor:
    """[...]: L of each row, 0 where it has no tokens.

    Args:
        scores: P, [..., E].
        num_scored: T, [...]: tokens behind the scores of all ranks.
        choices: int64 [..., E + 1]: C, and in the last column T', the tokens behind it.
        top_k: K.
    """
    E = scores.shape[-1]
    pairs = top_k * num_scored.clamp_min(1) * choices[..., E].clamp_min(1)
    return (scores * choices[..., :E]).sum(dim=-1) * E / pairs


def z_loss(logits: Tensor, real: Tensor, num_tokens: Tensor) -> Tensor:
    """This rank's part of Z, a scalar; ``num_tokens`` are those of all ranks."""
    squares = of_real_tokens(logits.logsumexp(dim=1).square(), real, 0.0)
    return squares.sum() / num_tokens.clamp_min(1)


def with_gradient_of(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """``x`` as it is; backward through it is backward through ``scale * loss`` too, a scalar that has no consumer.

    So any stage of a pipeline can have a loss of its own.
    """
    y: Tensor = _WithGradientOf.apply(x, loss, scale)
    return y


@torch.no_grad()
def update_expert_bias_(bias: Tensor, tokens_per_expert: Tensor, rate: float) -> None:
    """Moves ``bias`` [E] toward even loads: once per step that was applied, by the loads [E] of all its tokens.

    The steps sum to zero, so that the bias of all experts together does not drift.
    """
    loads = tokens_per_expert.to(bias.dtype)
    steps = torch.sign(loads.mean() - loads)
    bias.add_(steps - steps.mean(), alpha=rate)


@torch.no_grad()
def quantile_offsets(logits: Tensor, offsets: Tensor, top_k: int, real: Tensor) -> Tensor:
    """[E + 1] in the dtype of ``logits``: the offsets that even out these tokens, then 1; zeros if none is real.

    Micro-batches and ranks add up, and the last entry says how many there were.

    Args:
        logits: [T, E], of the micro-batch's tokens on all ranks that share it.
        offsets: [E], those by which they chose.
        top_k: K, less than E. Where E does not divide T K, the share of an expert is rounded down.
        real: bool [T].
    """
    if not len(logits):
        return logits.new_zeros(logits.shape[1] + 1)
    E = logits.shape[1]
    best = (logits - offsets).topk(top_k + 1, dim=1).values
    # at the (K+1)-th itself many margins of e would be its old offset, and offsets would stop short of even loads
    borders = best[:, -2:].mean(dim=1, keepdim=True)  # [T, 1]
    margins = of_real_tokens(logits - borders, real, -torch.inf).sort(dim=0, descending=True).values
    share = real.sum() * top_k // E  # on the device: no row is looked up from the host
    estimate = torch.nn.functional.pad(margins.index_select(0, share[None])[0], (0, 1), value=1.0)
    return torch.where(real.any(), estimate, 0.0)


@torch.no_grad()
def update_quantile_offsets_(offsets: Tensor, estimates: Tensor, decay: float) -> None:
    """Moves ``offsets`` [E] to decay * old + (1 - decay) * the mean estimate, less its mean over the experts.

    Once per step that was applied, by ``estimates`` [E + 1], the sum of ``quantile_offsets`` over all micro-batches and
    ranks. Without any the offsets stay.
    """
    mean = estimates[:-1] / estimates[-1].clamp_min(1.0)
    moved = decay * offsets + (1.0 - decay) * (mean - mean.mean()).to(offsets.dtype)
    offsets.copy_(torch.where(estimates[-1] > 0, moved, offsets))


@dataclass(frozen=True)
class LoadMetrics:
    """How even the loads of a layer's experts are.

    Attributes:
        max_violation: the greatest load divided by the mean, less 1 (arXiv:2408.15664): 0 where even, E / K - 1 where
            all tokens chose the same experts.
        entropy: of the share of choices that each expert has, in nats: log E where even.
        dead_experts: how many nobody chose.
    """

    max_violation: float
    entropy: float
    dead_experts: int


def load_metrics(tokens_per_expert: Tensor) -> LoadMetrics:
    """The metrics of loads [E], whole numbers; of a layer that no token passed, 0, 0 and E."""
    loads = tokens_per_expert.double()
    total = loads.sum()
    shares = loads / total.clamp_min(1.0)
    violation = shares.max() * len(loads) - 1.0 if total > 0 else 0.0
    return LoadMetrics(float(violation), float(-torch.xlogy(shares, shares).sum()), int((loads == 0).sum()))


class _WithGradientOf(torch.autograd.Function):
    """The first of two inputs, whose backward gives the second ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return dy, torch.full_like(loss, ctx.scale), None
