"""What a load-balancing loss wants of a router's logits: every expert's score, and the plain choice by the scores.

    softmax                scores p = softmax over E;     dlogit = p (g - sum over E of g p)
    sigmoid, sqrtsoftplus  scores p = q / s, s = sum over E of q + 1e-20;  dq = (g - sum over E of g p) / s
    routing_map[t, e]      e is among the K greatest of row t, of equal ones the lower: no bias, groups or capacity

Fedus et al. 2021, "Switch Transformer", arXiv:2101.03961: the loss sums scores times tokens per expert. Where the
router has bias or groups, ``fused_topk_router`` counts the tokens that really go to each.

T tokens, E experts. Saved for backward: the logits. Floor: forward eTE bytes read and 5TE written; backward 4TE + 2eTE.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalith.fusions.formulas.routing_scores import EPSILON, largest, score_of, slope_of
from megalith.fusions.formulas.rows import wide
from megalith.fusions.fused_topk_router import ScoreFunction, check_logits
from megalith.fusions.paths.backend import Backend, Fusion, compiled
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import register

__all__ = ["FUSION", "compute_routing_scores_for_aux_loss", "score_outputs"]


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: ScoreFunction = "softmax", *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """The map of the ``topk`` greatest scores, and all scores, which sum up to one.

    Args:
        logits: [T, E], floating.
        topk: K.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        routing_map [T, E], bool, and scores [T, E], float32 (float64 for float64): they are summed over all tokens.

    Raises:
        ShapeError: ``logits`` is not a matrix of floating numbers.
        ConfigError: ``topk`` is not in [1, E], or an unknown score.
        BackendError: ``backend`` cannot run on ``logits``.
    """
    check_logits(logits, topk, score_function)
    scores, routing_map = FUSION.path(logits, backend)(logits, topk, score_function)
    return routing_map, scores


def _scores(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    """Reference: scores, then the map."""
    x = logits.to(wide(logits.dtype))
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter_(1, largest(x.detach(), topk), True)
    if score == "softmax":
        return torch.softmax(x, dim=-1), chosen
    q = score_of(x, score)
    return q / (q.sum(dim=-1, keepdim=True) + EPSILON), chosen


def _scores_back(dscores: Tensor, logits: Tensor, score: str) -> Tensor:
    """Reference backward: dlogits [T, E]."""
    x = logits.to(dscores.dtype)
    if score == "softmax":
        p = torch.softmax(x, dim=-1)
        dlogits: Tensor = torch.ops.aten._softmax_backward_data(dscores, p, -1, x.dtype)  # in one pass
        return dlogits.to(logits.dtype)
    q = score_of(x, score)
    total = q.sum(dim=-1, keepdim=True) + EPSILON
    dq = (dscores - (dscores * q / total).sum(dim=-1, keepdim=True)) / total
    return (dq * slope_of(x, q, score)).to(logits.dtype)


def _blocked_scores(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    outputs = score_outputs(logits, topk, score)
    by_blocks(lambda logits: _scores(logits, topk, score), (logits,), outputs)
    return outputs


def _blocked_scores_back(dscores: Tensor, logits: Tensor, score: str) -> tuple[Tensor]:
    dlogits = logits.new_empty(logits.shape)
    by_blocks(lambda dscores, logits: (_scores_back(dscores, logits, score),), (dscores, logits), (dlogits,))
    return (dlogits,)


def score_outputs(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    """Memory for scores [T, E] and routing_map [T, E]."""
    scores = logits.new_empty(logits.shape, dtype=wide(logits.dtype))
    return scores, torch.empty_like(scores, dtype=torch.bool)


_blocked = register(
    "aux_loss_scores_blocked",
    _blocked_scores,
    score_outputs,
    _blocked_scores_back,
    lambda dscores, logits, score: (logits.new_empty(logits.shape),),
    gradients_of=("logits",),
    saves=lambda inputs, outputs: (inputs[0], inputs[2]),
    opaque=True,
)


def _triton(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    from megalith.fusions.kernels.aux_loss_scores import op

    return op(logits, topk, score)


_PATHS: Mapping[Backend, Callable[[Tensor, int, str], tuple[Tensor, Tensor]]] = {
    "triton": _triton,
    "compile": compiled(_scores),
    "blocked": _blocked,
    "reference": _scores,
}
FUSION = Fusion("aux_loss_scores", _PATHS)
