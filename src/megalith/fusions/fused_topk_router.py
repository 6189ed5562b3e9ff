"""A router behind its logits: scores, the choice of experts, their weights and the tokens of each, in one launch."""

from megalith.fusions.routing.topk_router import (
    Routing,
    ScoreFunction,
    check_logits,
    fused_topk_router,
    topk_routing_with_score_function,
)

__all__ = ["Routing", "ScoreFunction", "check_logits", "fused_topk_router", "topk_routing_with_score_function"]
