"""A router behind its logits: scores, the choice of experts, their weights and the tokens of each, in one launch.

What the scores and choices are: ``routing_scores``. With g = scaling_factor * dprobs, w the weights before scaling:

    softmax      dlogit = w (g - sum over K of g w) at the chosen, zero elsewhere
    pre-softmax  dlogit = p (g - sum over K of g p), p over all E, g zero at the others
    sigmoid ...  dq = (g - sum over K of g w) / (sum of q + 1e-20), or g where K = 1; dlogit = dq * slope

The choice itself has no gradient, nor has the bias, which only chooses.

T tokens, E experts, K experts per token. Saved for backward: logits and indices.
Floor: forward eTE + (8 + e)TK bytes and 8E, with logits of e bytes; backward eTE written and (8 + 2e)TK read, or
2eTE for pre-softmax.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.formulas.checks import check_floating, check_one_device, check_shape
from megalith.fusions.formulas.routing_scores import EPSILON, score_of, select, slope_of, softmax_of_best, weigh
from megalith.fusions.formulas.rows import wide
from megalith.fusions.fused_indices_converter import fused_indices_to_multihot
from megalith.fusions.paths.backend import Backend, Fusion, compiled
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import register

__all__ = [
    "FUSION",
    "Routing",
    "ScoreFunction",
    "check_logits",
    "fused_topk_router",
    "route_outputs",
    "topk_routing_with_score_function",
]

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Routing(NamedTuple):
    """Where tokens go: probs [T, K], indices [T, K], int64, the best first, and tokens_per_expert [E], int64."""

    probs: Tensor
    indices: Tensor
    tokens_per_expert: Tensor


def fused_topk_router(
    logits: Tensor,
    topk: int,
    *,
    score_function: ScoreFunction = "softmax",
    use_pre_softmax: bool = False,
    expert_bias: Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    backend: Backend | None = None,
) -> Routing:
    """The experts of each token, their weights, and how many tokens each expert gets.

    Args:
        logits: [T, E], floating. NaN is chosen as inf would be, and makes the token's weights NaN.
        topk: K. Of equal scores the lower expert is chosen.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by their sum where K > 1.
        use_pre_softmax: softmax over all E before the choice, and no division after it; else over the chosen K.
        expert_bias: [E], floating, added to the scores for the choice alone (sigmoid and sqrtsoftplus).
        num_groups: the experts are in so many groups, one after the other, of which only
        group_topk: the best can be chosen from; by the sum of their K / group_topk best scores.
        scaling_factor: multiplies the weights.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        probs [T, K] in the dtype of ``logits``, computed in float32; indices [T, K], the best first; and
        tokens_per_expert [E].

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: settings that cannot be met (K > E), contradict each other, or have no effect.
        BackendError: ``backend`` cannot run on ``logits``.
    """
    check_logits(logits, topk, score_function)
    check_floating(expert_bias=expert_bias)
    check_one_device(logits=logits, expert_bias=expert_bias)
    check_shape("expert_bias", expert_bias, logits.shape[1:], "one for each expert")
    _check_score(topk, score_function, use_pre_softmax, expert_bias)
    _check_groups(logits.shape[1], topk, num_groups, group_topk)
    score = "pre_softmax" if use_pre_softmax else score_function
    scale = 1.0 if scaling_factor is None else float(scaling_factor)
    compute = FUSION.path(logits, backend)
    return Routing(*compute(logits, expert_bias, topk, score, num_groups or 1, group_topk or 1, scale))


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: ScoreFunction = "softmax",
    expert_bias: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """``fused_topk_router`` in the form that the field knows: rows over all experts.

    Returns:
        routing_probs [T, E] in the dtype of ``logits``, zero where routing_map [T, E], bool, is False.
    """
    routing = fused_topk_router(
        logits,
        topk,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        expert_bias=expert_bias,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        backend=backend,
    )
    multihot, probs = fused_indices_to_multihot(routing.indices, routing.probs, logits.shape[1], backend=backend)
    return probs, multihot


_Routes = Callable[[Tensor, Tensor | None, int, str, int, int, float], tuple[Tensor, Tensor, Tensor]]


def _route(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: probs, indices and tokens_per_expert."""
    x = logits.to(wide(logits.dtype))
    indices = select(x.detach(), expert_bias, topk, score, num_groups, group_topk)
    chosen = indices.flatten()
    num_tokens = chosen.new_zeros(logits.shape[1]).scatter_add_(0, chosen, torch.ones_like(chosen))
    return weigh(x, indices, score, scale).to(logits.dtype), indices, num_tokens


def _route_back(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> Tensor:
    """Reference backward: dlogits [T, E]."""
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


def _blocked_route(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    probs, indices, num_tokens = route_outputs(logits, expert_bias, topk, score, num_groups, group_topk, scale)

    def formula(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _route(logits, expert_bias, topk, score, num_groups, group_topk, scale)

    by_blocks(formula, (logits,), (probs, indices), (num_tokens.zero_(),))
    return probs, indices, num_tokens


def _blocked_route_back(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> tuple[Tensor]:
    dlogits = logits.new_empty(logits.shape)

    def formula(dprobs: Tensor, logits: Tensor, indices: Tensor) -> tuple[Tensor]:
        return (_route_back(dprobs, logits, indices, score, scale),)

    by_blocks(formula, (dprobs, logits, indices), (dlogits,))
    return (dlogits,)


def route_outputs(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for probs [T, K], indices [T, K] and tokens_per_expert [E]."""
    probs = logits.new_empty(logits.shape[0], topk)
    indices = torch.empty_like(probs, dtype=torch.int64)
    return probs, indices, indices.new_empty(logits.shape[1])


_blocked = register(
    "topk_router_blocked",
    _blocked_route,
    route_outputs,
    _blocked_route_back,
    lambda dprobs, logits, indices, score, scale: (logits.new_empty(logits.shape),),
    gradients_of=("logits",),
    saves=lambda inputs, outputs: (inputs[0], outputs[1], inputs[3], inputs[6]),
    opaque=True,
)


def _triton(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score: str, num_groups: int, group_topk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.kernels.topk_router import op

    return op(logits, expert_bias, topk, score, num_groups, group_topk, scale)


_PATHS: Mapping[Backend, _Routes] = {
    "triton": _triton,
    "compile": compiled(_route),
    "blocked": _blocked,
    "reference": _route,
}
FUSION = Fusion("topk_router", _PATHS)


def check_logits(logits: Tensor, topk: int, score_function: str) -> None:
    """What all operations on a router's logits want of them."""
    check_floating(logits=logits)
    if logits.dim() != 2:
        raise ShapeError(f"logits must be [T, E], a row for each token; got {list(logits.shape)}")
    if not 1 <= topk <= logits.shape[1]:
        raise ConfigError(f"topk must be from 1 to the number of experts, {logits.shape[1]}; got {topk}")
    if score_function not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise ConfigError(f"score_function must be softmax, sigmoid or sqrtsoftplus; got {score_function!r}")


def _check_score(topk: int, score_function: str, use_pre_softmax: bool, expert_bias: Tensor | None) -> None:
    if score_function != "softmax" and use_pre_softmax:
        raise ConfigError(f"use_pre_softmax is about softmax, and score_function is {score_function!r}: leave it out")
    if score_function == "softmax" and expert_bias is not None:
        raise ConfigError("expert_bias is added to scores of their own: use score_function='sigmoid' or 'sqrtsoftplus'")
    if score_function == "softmax" and topk == 1 and not use_pre_softmax:
        raise ConfigError("softmax over the one expert of topk=1 is 1 and has no gradient: use use_pre_softmax=True")


def _check_groups(num_experts: int, topk: int, num_groups: int | None, group_topk: int | None) -> None:
    if num_groups is None and group_topk is None:
        return
    if num_groups is None or group_topk is None:
        raise ConfigError(f"num_groups and group_topk go together; got {num_groups} and {group_topk}")
    if num_groups < 1 or num_experts % num_groups:
        raise ConfigError(f"num_groups must divide the {num_experts} experts; got {num_groups}")
    if not 1 <= group_topk <= num_groups:
        raise ConfigError(f"group_topk must be from 1 to num_groups, {num_groups}; got {group_topk}")
    if topk % group_topk:
        raise ConfigError(f"topk ({topk}) must be a multiple of group_topk ({group_topk}): a group is worth as many")
    if topk > group_topk * (num_experts // num_groups):
        raise ConfigError(f"{group_topk} groups of {num_experts // num_groups} experts have fewer than topk, {topk}")
