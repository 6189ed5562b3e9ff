"""Which experts the tokens go to, and what each is worth: functions of a router's logits [T, E].

    logits    x W^T + b, in float32 (float64 for float64)
    weights   of the experts chosen, as ``megalith.fusions.fused_topk_router`` has them, by the score function;
              of choices by Sinkhorn: sigmoid(logit) for K = 1, softmax over all E for more
    sinkhorn  p_te = exp(logit_te) u_t v_e with rows of sum 1/T and columns of sum 1/E; the K greatest of each row
    quantile  the K greatest of logit_te - offset_e; ``balance.quantile_offsets`` says what the offsets are
    in turn   token t takes the experts (t K + k) mod E, k < K

Lewis et al. 2021, "BASE Layers", arXiv:2103.16716, and Clark et al. 2022, arXiv:2202.01169 for Sinkhorn's iteration.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.config import RouterConfig
from megalith.fusions import fused_topk_router
from megalith.fusions.routing.scores import weigh

__all__ = [
    "Routing",
    "choose_by_score",
    "choose_in_turn",
    "largest_of_rows",
    "of_real_tokens",
    "router_logits",
    "sinkhorn",
    "weights_of",
]

# fixed, so that no iteration waits for the device; the marginals of random logits are right to 1e-6 long before
_SINKHORN_ITERATIONS = 32


@dataclass(frozen=True, eq=False)
class Routing:
    """Where T tokens go.

    Attributes:
        indices: int64 [T, K]. E or more marks a slot that is dropped: E + e, where the token had chosen e.
        weights: [T, K], float32 or wider; 0 where the slot is dropped.
        tokens_per_expert: int64 [E]: how often tokens chose each expert, those dropped later too, padding not.
    """

    indices: Tensor
    weights: Tensor
    tokens_per_expert: Tensor


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, H], weight [E, H], bias [E] or None -> [T, E] in float32, or float64 where ``x`` is.

    Backward keeps ``x`` and ``weight`` in the dtypes they have.
    """
    logits: Tensor = _WideProduct.apply(x, weight)
    return logits if bias is None else logits + bias.to(logits.dtype)


def choose_by_score(
    logits: Tensor, top_k: int, router: RouterConfig, expert_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[T, K] each: the experts of the best scores within the groups allowed, the best first, and their weights.

    ``expert_bias`` [E] is for the choice alone.
    """
    routing = fused_topk_router(
        logits,
        top_k,
        score_function=router.score_function,
        use_pre_softmax=router.pre_softmax,
        expert_bias=expert_bias,
        num_groups=router.num_groups,
        group_topk=router.group_topk,
        group_score_topk=router.group_score_topk,
        scaling_factor=router.scaling_factor,
    )
    return routing.indices, routing.probs


def choose_in_turn(token_ids: Tensor, top_k: int, num_experts: int) -> Tensor:
    """[T, K]: the experts of tokens with these global ids, int64 [T]; equally many each where E divides T K."""
    return (token_ids[:, None] * top_k + torch.arange(top_k, device=token_ids.device)) % num_experts


def weights_of(logits: Tensor, indices: Tensor, router: RouterConfig) -> Tensor:
    """[T, K]: the weights of experts that are chosen already, int64 [T, K] in any order; 0 of dropped slots."""
    K, E = indices.shape[1], logits.shape[1]
    chosen = indices % E
    if router.selection == "sinkhorn":
        score = "sigmoid" if K == 1 else "pre_softmax"
    else:
        score = "pre_softmax" if router.pre_softmax else router.score_function
    if score == "softmax":  # the formula of the fused one wants the best first
        weights = torch.softmax(logits.gather(1, chosen), dim=1) * router.scaling_factor
    else:
        weights = weigh(logits, chosen, score, router.scaling_factor)
    return weights * (indices < E)


def largest_of_rows(values: Tensor, k: int) -> Tensor:
    """int64 [T, k]: the columns of the ``k`` largest of each row, of equal ones the lower."""
    return fused_topk_router(values.detach(), k, use_pre_softmax=True).indices


def of_real_tokens(x: Tensor, real: Tensor, otherwise: Tensor | float) -> Tensor:
    """[T, ...]: ``x`` where a token is ``real``, bool [T]; ``otherwise`` for tokens of padding, which count nowhere.

    All that sums, sorts or bounds over tokens goes through here, with what leaves a token out of that: 0 in a sum, -inf
    among the greatest.
    """
    return torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, otherwise)


@torch.no_grad()
def sinkhorn(logits: Tensor, real: Tensor) -> Tensor:
    """log p [T, E] of logits whose tokens are in balance among the experts.

    Args:
        logits: [T, E], of all tokens that are balanced together.
        real: bool [T]; a token of padding has no share in the balance.
    """
    num_tokens, E = real.sum().to(logits.dtype), logits.shape[1]
    log_u, log_v = logits.new_zeros(len(logits)), logits.new_zeros(E)
    for _ in range(_SINKHORN_ITERATIONS):  # on logarithms, which do not overflow
        log_u = of_real_tokens(-num_tokens.log() - (logits + log_v).logsumexp(dim=1), real, -torch.inf)
        log_v = -math.log(E) - (logits + log_u[:, None]).logsumexp(dim=0)
    return logits + log_u[:, None] + log_v


class _WideProduct(torch.autograd.Function):
    """x W^T computed, and given, in float32 or wider; nothing wide is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = dlogits @ weight.to(dlogits.dtype)
        dw = dlogits.t() @ x.to(dlogits.dtype)
        return dx.to(x.dtype), dw.to(weight.dtype)
