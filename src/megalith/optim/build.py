"""The optimizers that ``optim.name`` can select."""

from collections.abc import Mapping
from types import MappingProxyType

from megalith.config import OptimConfig
from megalith.optim.adamw import build_adamw
from megalith.optim.optimizer import BuildOptimizer, NamedParameters, Optimizer
from megalith.optim.sgd import build_sgd

__all__ = ["build_optimizer"]

_OPTIMIZERS: Mapping[str, BuildOptimizer] = MappingProxyType({"adamw": build_adamw, "sgd": build_sgd})


def build_optimizer(parameters: NamedParameters, config: OptimConfig) -> Optimizer:
    """Returns the optimizer that ``config`` selects. Raises ConfigError if overrides match nothing or disagree."""
    return _OPTIMIZERS[config.name](parameters, config)
