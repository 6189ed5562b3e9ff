"""Cross entropy of logits whose vocabulary may be split over ranks."""

from megalith.fusions.cross_entropy.vocab_parallel import (
    calculate_cross_entropy_loss,
    calculate_gradients,
    calculate_logits_max,
    calculate_predicted_logits,
    fused_vocab_parallel_cross_entropy,
)

__all__ = [
    "calculate_cross_entropy_loss",
    "calculate_gradients",
    "calculate_logits_max",
    "calculate_predicted_logits",
    "fused_vocab_parallel_cross_entropy",
]
