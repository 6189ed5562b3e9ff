"""What a load-balancing loss wants of a router's logits: every expert's score, and the plain choice by the scores.

    softmax                scores p = softmax over E;     dlogit = p (g - sum over E of g p)
    sigmoid, sqrtsoftplus  scores p = q / s, s = sum over E of q + 1e-20;  dq = (g - sum over E of g p) / s
    routing_map[t, e]      e is among the K greatest of row t, of equal ones the lower: no bias, groups or capacity

Fedus et al. 2021, "Switch Transformer", arXiv:2101.03961: the loss sums scores times tokens per expert. Where the
router has bias or groups, ``fused_topk_router`` counts the tokens that really go to each.

T tokens, E experts. Saved for backward: the logits. Floor: forward eTE bytes read and 5TE written; backward 4TE + 2eTE.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.fusions.routing.aux_loss_scores_formulas import blocked, compiled, reference
from megalith.fusions.routing.topk_router import ScoreFunction, check_logits

__all__ = ["FUSION", "compute_routing_scores_for_aux_loss"]


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


def _triton(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    from megalith.fusions.routing.kernels.aux_loss_scores import op

    return op(logits, topk, score)


_PATHS: Mapping[Backend, Callable[[Tensor, int, str], tuple[Tensor, Tensor]]] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("aux_loss_scores", _PATHS, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))
