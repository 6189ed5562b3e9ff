"""Learning rates that are a factor of the others' for some parameters, whatever optimizer updates them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from megalith.config import OptimConfig
from megalith.optim.optimizer import Optimizer

__all__ = ["RateFactors", "multiply_rates_"]


@dataclass(frozen=True)
class RateFactors:
    """``lr``: on the learning rate, while its product with the weight decay stays; ``eps``: on that of AdamW."""

    lr: float = 1.0
    eps: float = 1.0


def multiply_rates_(optimizer: Optimizer, factors: Mapping[nn.Parameter, RateFactors], config: OptimConfig) -> None:
    """Splits the groups of ``optimizer`` into those of equal factors, and multiplies what a scheduler reads there."""
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
