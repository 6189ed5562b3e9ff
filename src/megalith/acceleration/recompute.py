"""Activation recomputation: keep a function's inputs, and compute it again in backward.

Dropout masks here are functions of global indices, so there is no generator state to save and restore.
Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["Recompute", "recompute"]

Recompute = Literal["none", "full", "selective"]


def recompute(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)``, whose activations are dropped and computed again when its gradient is asked for."""
    out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return out
