"""Per-parameter factors on learning rate and epsilon, independent of the optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from megalith.config import OptimConfig
from megalith.optim.optimizer import Optimizer

__all__ = ["RateFactors", "multiply_rates_"]


@dataclass(frozen=True)
class RateFactors:
    """``lr``: factor on the learning rate, keeping its product with weight decay; ``eps``: factor on AdamW's eps."""

    lr: float = 1.0
    eps: float = 1.0


def multiply_rates_(optimizer: Optimizer, factors: Mapping[nn.Parameter, RateFactors], config: OptimConfig) -> None:
    """Splits the groups of ``optimizer`` by factor, and applies the factors to the values that a scheduler reads."""
    groups = []
    for group in optimizer.param_groups:
        members: dict[RateFactors, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            members.setdefault(factors.get(parameter, RateFactors()), []).append(parameter)
        for factor, parameters in members.items():
            rates = {
                "max_lr": group.get("max_lr", config.lr) * factor.lr,
                "min_lr": group.get("min_lr", config.min_lr) * factor.lr,
                "wd_mult": group.get("wd_mult", 1.0) / factor.lr,
                "weight_decay": group["weight_decay"] / factor.lr,
            }
            eps = {"eps": group["eps"] * factor.eps} if "eps" in group else {}
            groups.append({**group, **rates, **eps, "params": parameters})
    optimizer.param_groups[:] = groups
