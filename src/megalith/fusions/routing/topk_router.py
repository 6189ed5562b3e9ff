"""A router given its logits: scores, choice of experts, their weights and token counts, in one launch.

Scores and choices are defined in ``routing.scores``. With g = scaling_factor * dprobs and w the weights before
scaling:

    softmax      dlogit = w (g - sum over K of g w) for the chosen, zero elsewhere
    pre-softmax  dlogit = p (g - sum over K of g p), p over all E, g zero for the others
    sigmoid ...  dq = (g - sum over K of g w) / (sum of q + 1e-20), or g if K = 1; dlogit = dq * slope

The choice itself is not differentiable, so the bias, which only affects the choice, has no gradient.

T tokens, E experts, K experts per token. Saved for backward: logits and indices.
Lower bound: forward eTE + (8 + e)TK bytes and 8E, with logits of e bytes; backward eTE written and (8 + 2e)TK read, or
2eTE for pre-softmax.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Unpack

from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.fusions.routing.indices_converter import fused_indices_to_multihot
from megalith.fusions.routing.topk_router_formulas import Choice, blocked, compiled, reference

__all__ = [
    "FUSION",
    "Routing",
    "ScoreFunction",
    "check_logits",
    "fused_topk_router",
    "topk_routing_with_score_function",
]

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Routing(NamedTuple):
    """The routing of each token: probs [T, K], indices [T, K], int64, best first, and tokens_per_expert [E], int64."""

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
    group_score_topk: int | None = None,
    scaling_factor: float | None = None,
    backend: Backend | None = None,
) -> Routing:
    """Returns the experts of each token, their weights, and the number of tokens per expert.

    Args:
        logits: [T, E], floating point. NaN ranks like inf in the choice, and makes the token's weights NaN.
        topk: K. Ties are resolved in favor of the lower index.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by their sum if K > 1.
        use_pre_softmax: softmax over all E before the choice, without renormalization; otherwise over the chosen K.
        expert_bias: [E], floating point, added to the scores for the choice only (sigmoid and sqrtsoftplus).
        num_groups: the number of consecutive groups that the experts form (group-limited routing).
        group_topk: experts are chosen only from this many best groups.
        group_score_topk: a group's score is the sum of this many best scores; defaults to K / group_topk.
        scaling_factor: multiplies the weights.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        probs [T, K] in the dtype of ``logits``, computed in float32; indices [T, K], best first; tokens_per_expert [E].

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: settings that are impossible (K > E), contradict each other, or have no effect.
        BackendError: ``backend`` cannot run on ``logits``.
    """
    check_logits(logits, topk, score_function)
    check_floating(expert_bias=expert_bias)
    check_one_device(logits=logits, expert_bias=expert_bias)
    check_shape("expert_bias", expert_bias, logits.shape[1:], "one for each expert")
    _check_score(topk, score_function, use_pre_softmax, expert_bias)
    _check_groups(logits.shape[1], topk, num_groups, group_topk, group_score_topk)
    score = "pre_softmax" if use_pre_softmax else score_function
    scale = 1.0 if scaling_factor is None else float(scaling_factor)
    best = group_score_topk or topk // (group_topk or 1)
    choice = Choice(topk, score, num_groups or 1, group_topk or 1, best, scale)
    compute = FUSION.path(logits, backend)
    return Routing(*compute(logits, expert_bias, *choice))


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
    """``fused_topk_router`` with Megatron's signature and dense results.

    Returns:
        routing_probs [T, E] in the dtype of ``logits``, zero where routing_map is False, and routing_map [T, E], bool.
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


def _triton(logits: Tensor, expert_bias: Tensor | None, *options: Unpack[Choice]) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.routing.kernels.topk_router import op

    return op(logits, expert_bias, *options)


_Routes = Callable[[Tensor, Tensor | None, int, str, int, int, int, float], tuple[Tensor, Tensor, Tensor]]
_PATHS: Mapping[Backend, _Routes] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("topk_router", _PATHS, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))


def check_logits(logits: Tensor, topk: int, score_function: str) -> None:
    """Checks shared by all operations on a router's logits; raises ShapeError or ConfigError."""
    check_floating(logits=logits)
    if logits.dim() != 2:
        raise ShapeError(f"logits must be [T, E], a row for each token; got {list(logits.shape)}")
    if not 1 <= topk <= logits.shape[1]:
        raise ConfigError(f"topk must be from 1 to the number of experts, {logits.shape[1]}; got {topk}")
    if score_function not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise ConfigError(f"score_function must be softmax, sigmoid or sqrtsoftplus; got {score_function!r}")


def _check_score(topk: int, score_function: str, use_pre_softmax: bool, expert_bias: Tensor | None) -> None:
    if score_function != "softmax" and use_pre_softmax:
        raise ConfigError(f"use_pre_softmax requires score_function='softmax'; got {score_function!r}; leave it out")
    if score_function == "softmax" and expert_bias is not None:
        raise ConfigError("expert_bias requires independent scores; use score_function='sigmoid' or 'sqrtsoftplus'")
    if score_function == "softmax" and topk == 1 and not use_pre_softmax:
        raise ConfigError(
            "softmax over the single chosen expert of topk=1 is always 1 and has no gradient; set use_pre_softmax=True"
        )


def _check_groups(
    num_experts: int, topk: int, num_groups: int | None, group_topk: int | None, group_score_topk: int | None
) -> None:
    if num_groups is None and group_topk is None:
        if group_score_topk is not None:
            raise ConfigError(f"group_score_topk={group_score_topk} has no effect without num_groups; leave it out")
        return
    if num_groups is None or group_topk is None:
        raise ConfigError(f"num_groups and group_topk must be set together; got {num_groups} and {group_topk}")
    if num_groups < 1 or num_experts % num_groups:
        raise ConfigError(f"num_groups must divide the {num_experts} experts; got {num_groups}")
    if not 1 <= group_topk <= num_groups:
        raise ConfigError(f"group_topk must be from 1 to num_groups, {num_groups}; got {group_topk}")
    per_group = num_experts // num_groups
    if topk > group_topk * per_group:
        raise ConfigError(f"topk ({topk}) must be at most the number of experts in {group_topk} groups of {per_group}")
    if group_score_topk is None:
        if topk % group_topk:
            raise ConfigError(
                f"topk ({topk}) must be a multiple of group_topk ({group_topk}), because a group is scored by its best "
                "topk / group_topk experts; otherwise pass group_score_topk"
            )
    elif not 1 <= group_score_topk <= per_group:
        raise ConfigError(
            f"group_score_topk must be from 1 to the {per_group} experts of a group; got {group_score_topk}"
        )
