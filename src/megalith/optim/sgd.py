"""Stochastic gradient descent with momentum: Sutskever et al. 2013, in torch's formulation and implementation.

b = momentum b + g,    w -= lr (g + momentum b) with nesterov, lr b without;    g includes weight_decay w
"""

import torch

from megalith.config import OptimConfig
from megalith.optim.optimizer import NamedParameters, Optimizer, decaying_groups
from megalith.optim.torch_optimizer import TorchOptimizer

__all__ = ["build_sgd"]


def build_sgd(parameters: NamedParameters, config: OptimConfig) -> Optimizer:
    """Returns SGD in scheduler-driven groups; state ``momentum_buffer``, none without momentum.

    Raises as parameter_groups.
    """
    named = dict(parameters)
    groups = decaying_groups(named.items(), config)
    settings = config.sgd
    assert settings is not None, "optim.name is sgd"
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    moments = ("momentum_buffer",) if settings.momentum else ()
    return TorchOptimizer(optimizer, named, moments, counts_updates=False)
