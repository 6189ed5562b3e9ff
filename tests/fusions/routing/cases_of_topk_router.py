"""Cases of the router; the number of experts is one more than the width, so that groups divide it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.routing.topk_router import FUSION, Routing, fused_topk_router
from tests.fusions.harness import Case, Inputs

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x,
    "pre_softmax": lambda x: torch.softmax(x, dim=-1),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "sqrtsoftplus": lambda x: torch.log1p(torch.exp(x)).sqrt(),
}


def inputs(bias: bool, T: int, width: int, dtype: torch.dtype, device: str) -> Inputs:
    made: Inputs = {"logits": 2 * torch.randn(T, width + 1, device=device).to(dtype)}
    if bias:
        made["expert_bias"] = torch.rand(width + 1, device=device)
    return made


def formula(
    logits: Tensor,
    expert_bias: Tensor | None = None,
    *,
    topk: int,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    group_score_topk: int | None = None,
    scaling_factor: float = 1.0,
) -> Routing:
    score = SCORES["pre_softmax" if use_pre_softmax else score_function](logits)
    chosen = torch.zeros(len(logits), topk, dtype=torch.int64, device=logits.device)
    for row, values in enumerate(score.detach() + (0 if expert_bias is None else expert_bias)):
        groups = values.view(num_groups, -1)
        worth = groups.sort(dim=1, descending=True).values[:, : group_score_topk or topk // group_topk].sum(dim=1)
        best = worth.sort(descending=True, stable=True).indices[:group_topk]
        allowed = torch.zeros_like(groups, dtype=torch.bool)
        allowed[best] = True
        order = values.where(allowed.flatten(), -torch.inf).sort(descending=True, stable=True).indices
        chosen[row] = order[:topk]
    weights = score.gather(1, chosen)
    if score_function == "softmax" and not use_pre_softmax:
        weights = torch.softmax(weights, dim=-1)
    elif score_function != "softmax" and topk > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(weights * scaling_factor, chosen, torch.bincount(chosen.flatten(), minlength=logits.shape[1]))


class RouterCase(Case):
    """Weights sum to one, so equal upstream gradients would leave only rounding; these differ."""

    def expanded(self, dy: Tensor) -> Tensor:
        return torch.linspace(0.5, 2.0, dy.shape[-1], device=dy.device).to(dy.dtype).expand(dy.shape)


def case(name: str, topk: int, *, bias: bool = False, **settings: Any) -> Case:
    whole = settings.get("use_pre_softmax", False)
    return RouterCase(
        f"router, {name}",
        FUSION,
        partial(inputs, bias),
        partial(fused_topk_router, topk=topk, **settings),
        partial(formula, topk=topk, **settings),
        terms=lambda logits, **_: {"0": logits.shape[1] if whole else topk, "dlogits": topk},
        cancels=("dlogits",),
        cost=partial(cost.topk_router, topk=topk, whole=whole),
        constant=("expert_bias",),
        shared=("expert_bias",),
        widths=(7, 127),
    )


CASES = [
    case("softmax", 3),
    case("softmax before the choice, scaled", 3, use_pre_softmax=True, scaling_factor=2.5),
    case("sigmoid, bias, groups, scaled", 4, bias=True, score_function="sigmoid", num_groups=4, group_topk=2,
         scaling_factor=2.5),
    case("sigmoid, one expert", 1, score_function="sigmoid"),
    case("sqrtsoftplus", 3, score_function="sqrtsoftplus"),
    case("softmax before the choice, groups", 4, use_pre_softmax=True, num_groups=4, group_topk=2),
    case("softmax before the choice, groups by their best", 4, use_pre_softmax=True, num_groups=4, group_topk=3,
         group_score_topk=1),
]  # fmt: skip
