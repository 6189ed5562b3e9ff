"""Cases of the scores for a load-balancing loss; the width is the number of experts."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.routing.aux_loss_scores import FUSION, compute_routing_scores_for_aux_loss
from tests.fusions.harness import Case, Inputs
from tests.fusions.routing.cases_of_topk_router import SCORES

K = 3


def inputs(T: int, E: int, dtype: torch.dtype, device: str) -> Inputs:
    return {"logits": 2 * torch.randn(T, E, device=device).to(dtype)}


def formula(logits: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    score = SCORES["pre_softmax" if score_function == "softmax" else score_function](logits)
    chosen = logits.detach().sort(dim=1, descending=True, stable=True).indices[:, :K]
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return routing_map, score / score.sum(dim=-1, keepdim=True)


class ScoreCase(Case):
    """Scores sum to one, so equal upstream gradients would leave only rounding; these differ."""

    def expanded(self, dy: Tensor) -> Tensor:
        return torch.linspace(0.5, 2.0, dy.shape[-1], device=dy.device).to(dy.dtype).expand(dy.shape)


CASES = [
    ScoreCase(
        f"auxiliary loss, {score}",
        FUSION,
        inputs,
        partial(compute_routing_scores_for_aux_loss, topk=K, score_function=score),
        partial(formula, score_function=score),
        terms=lambda logits: {"1": logits.shape[1], "dlogits": logits.shape[1]},
        cancels=("dlogits",),
        cost=cost.aux_loss_scores,
        widths=(7, 127),
    )
    for score in ("softmax", "sigmoid", "sqrtsoftplus")
]
