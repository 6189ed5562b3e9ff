"""AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101. Uses torch's implementation, over DTensors."""

import torch

from megalith.config import OptimConfig
from megalith.optim.optimizer import NamedParameters, Optimizer, decaying_groups
from megalith.optim.torch_optimizer import TorchOptimizer

__all__ = ["build_adamw"]


def build_adamw(parameters: NamedParameters, config: OptimConfig) -> Optimizer:
    """Returns AdamW in scheduler-driven groups; state ``exp_avg`` and ``exp_avg_sq``. Raises as parameter_groups."""
    named = dict(parameters)
    groups = decaying_groups(named.items(), config)
    settings = config.adamw
    assert settings is not None, "optim.name is adamw"
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=settings.betas, eps=settings.eps, fused=True)
    return TorchOptimizer(optimizer, named, ("exp_avg", "exp_avg_sq"), counts_updates=True)
