"""The choice of experts and their weights as functions of a router's logits [T, E].

    logits       x W^T + b, in float32 (float64 for float64)
    weights      of the chosen experts, by the score function as in ``megalith.fusions.fused_topk_router``;
                 with Sinkhorn: sigmoid(logit) for K = 1, softmax over all E for K > 1
    sinkhorn     p_te = exp(logit_te) u_t v_e with row sums 1/T and column sums 1/E; the K largest of each row
    quantile     the K largest of logit_te - offset_e; ``balance.quantile_offsets`` defines the offsets
    round robin  token t chooses the experts (t K + k) mod E, k < K

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

# fixed, which avoids host synchronization; the marginals of random logits are accurate to 1e-6 much earlier
_SINKHORN_ITERATIONS = 32


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts and weights of T tokens.

    Attributes:
        indices: int64 [T, K]. A dropped choice of expert e is stored as E + e.
        weights: [T, K], float32 or wider; 0 for dropped choices.
        tokens_per_expert: int64 [E]: how often each expert was chosen, including dropped choices but not padding.
    """

    indices: Tensor
    weights: Tensor
    tokens_per_expert: Tensor


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes logits: x [T, H], weight [E, H], bias [E] or None -> [T, E] in float32, or float64 if ``x`` is float64.

    ``x`` and ``weight`` are saved for backward in their own dtypes.
    """
    logits: Tensor = _WideProduct.apply(x, weight)
    return logits if bias is None else logits + bias.to(logits.dtype)


def choose_by_score(
    logits: Tensor, top_k: int, router: RouterConfig, expert_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the experts with the best scores within the allowed groups, best first, and their weights, both [T, K].

    ``expert_bias`` [E] affects the choice only, not the weights.
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
    """Returns experts [T, K] in round-robin order of the global ``token_ids``, int64 [T]; balanced if E divides T K."""
    return (token_ids[:, None] * top_k + torch.arange(top_k, device=token_ids.device)) % num_experts


def weights_of(logits: Tensor, indices: Tensor, router: RouterConfig) -> Tensor:
    """Returns the weights [T, K] of chosen experts ``indices``, int64 [T, K] in any order; 0 for dropped choices."""
    K, E = indices.shape[1], logits.shape[1]
    chosen = indices % E
    if router.selection == "sinkhorn":
        score = "sigmoid" if K == 1 else "pre_softmax"
    else:
        score = "pre_softmax" if router.pre_softmax else router.score_function
    if score == "softmax":  # ``weigh`` would require the best expert first
        weights = torch.softmax(logits.gather(1, chosen), dim=1) * router.scaling_factor
    else:
        weights = weigh(logits, chosen, score, router.scaling_factor)
    return weights * (indices < E)


def largest_of_rows(values: Tensor, k: int) -> Tensor:
    """Returns int64 [T, k], the columns of the ``k`` largest values of each row; ties go to the lower column."""
    return fused_topk_router(values.detach(), k, use_pre_softmax=True).indices


def of_real_tokens(x: Tensor, real: Tensor, otherwise: Tensor | float) -> Tensor:
    """Returns ``x`` [T, ...] with the value ``otherwise`` for padding tokens, those that are not ``real`` (bool [T]).

    Every sum, sort or bound over tokens uses it, with the value that excludes a token: 0 in a sum, -inf for a maximum.
    """
    return torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, otherwise)


@torch.no_grad()
def sinkhorn(logits: Tensor, real: Tensor) -> Tensor:
    """Returns log p [T, E], the logits scaled so that tokens are balanced among the experts.

    Args:
        logits: [T, E], of all tokens that are balanced together.
        real: bool [T]; padding tokens do not take part in the balance.
    """
    num_tokens, E = real.sum().to(logits.dtype), logits.shape[1]
    log_u, log_v = logits.new_zeros(len(logits)), logits.new_zeros(E)
    for _ in range(_SINKHORN_ITERATIONS):  # in log space, to avoid overflow
        log_u = of_real_tokens(-num_tokens.log() - (logits + log_v).logsumexp(dim=1), real, -torch.inf)
        log_v = -math.log(E) - (logits + log_u[:, None]).logsumexp(dim=0)
    return logits + log_u[:, None] + log_v


class _WideProduct(torch.autograd.Function):
    """x W^T computed and returned in float32 or wider, without saving wide copies for backward."""

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
