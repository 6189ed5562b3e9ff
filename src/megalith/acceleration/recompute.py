"""Activation recomputation, applied to modules from outside: keep a module's inputs, compute it again in backward.

Dropout masks here are functions of global indices, so there is no generator state to save and restore.
Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalith.fusions.paths.backend import Backend, chosen_by_use, use

__all__ = ["recompute", "recompute_modules_"]


def recompute(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)``, whose activations are dropped and computed again when its gradient is asked for."""
    if not torch.is_grad_enabled():
        return function(*args)
    if not torch.compiler.is_compiling():  # which makes one graph of both, and cannot trace `use`
        function = partial(_preferring, chosen_by_use(), function)
    out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return out


def _preferring(backend: Backend | None, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)`` on the paths of the forward, as backward may run in another thread, or outside of ``use``."""
    with use(backend):
        return function(*args)


def recompute_modules_(modules: Iterable[nn.Module]) -> None:
    """Makes each of ``modules`` run under ``recompute``; names, state and hooks stay as they are."""
    for module in modules:
        # the instance's forward shadows that of its class; hooks (FSDP2's gathers) stay around it
        module.forward = partial(recompute, module.forward)
