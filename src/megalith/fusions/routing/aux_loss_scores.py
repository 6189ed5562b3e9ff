"""Inputs of a load-balancing loss, from a router's logits: all experts' scores, and the plain top-k choice.

    softmax                scores p = softmax over E;     dlogit = p (g - sum over E of g p)
    sigmoid, sqrtsoftplus  scores p = q / s, s = sum over E of q + 1e-20;  dq = (g - sum over E of g p) / s
    routing_map[t, e]      e is among the K largest of row t, ties to the lower index; no bias, groups or capacity

Fedus et al. 2021, "Switch Transformer", arXiv:2101.03961: the loss sums scores times tokens per expert. If the router
has bias or groups, ``fused_topk_router`` counts the tokens that each expert actually gets.

T tokens, E experts, logits of e bytes. Saved for backward: the logits.
Lower bound: forward eTE bytes read and 5TE written; backward 4TE + 2eTE.
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
    """Returns the map of the ``topk`` largest scores, and all scores, which sum to one per token.

    Args:
        logits: [T, E], floating point.
        topk: K.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        routing_map [T, E], bool, and scores [T, E], float32 (float64 for float64) because the loss sums them over
        tokens.

    Raises:
        ShapeError: ``logits`` is not a floating-point matrix.
        ConfigError: ``topk`` is not in [1, E], or an unknown score function.
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
