"""The optimizer: which parameters decay, which follow a learning rate of their own, and AdamW over all of them.

AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101. It is torch's, over DTensors: every rank updates its own shard, and
the moments are sharded as the weights are.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig, ParamGroupOverride
from megalith.errors import ConfigError

__all__ = ["build_optimizer", "optimizer_tensors", "parameter_groups", "set_num_updates_"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OVERRIDABLE = ("max_lr", "min_lr", "wd_mult")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over ``model``, in groups that an OptimizerParamScheduler drives, with its moments allocated.

    Raises ConfigError for another optimizer than AdamW, and for overrides that match nothing or disagree.
    """
    if config.adamw is None:
        raise ConfigError(f"optim.name={config.name} cannot be built yet; use optim.name=adamw")
    groups = parameter_groups(model.named_parameters(), config.overrides)
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.adamw.betas, eps=config.adamw.eps, weight_decay=0.0, fused=True
    )
    for parameter in (parameter for group in groups for parameter in group["params"]):
        # made now rather than at the first step, so that a checkpoint has somewhere to be read into
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
        }
    return optimizer


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], overrides: Sequence[ParamGroupOverride]
) -> list[dict[str, Any]]:
    """Named parameters by what they share: ``wd_mult`` (0 for vectors: norms and biases; else 1) and overrides.

    An override's ``match`` is a shell pattern over the whole name: ``*.bias``, ``model.embed_tokens.*``.

    Raises:
        ConfigError: an override matches nothing, or two that match one parameter disagree.
    """
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    unused = {override.match for override in overrides}
    for name, parameter in parameters:
        settings = {"wd_mult": 0.0 if parameter.dim() == 1 else 1.0}
        said: dict[str, str] = {}
        for override in (override for override in overrides if fnmatchcase(name, override.match)):
            unused.discard(override.match)
            for key in _OVERRIDABLE:
                value = getattr(override, key)
                if value is None:
                    continue
                if key in said and settings[key] != value:
                    raise ConfigError(
                        f"optim.overrides disagree on {key} of {name}: {said[key]!r} says {settings[key]}, "
                        f"{override.match!r} says {value}; make one of the patterns narrower"
                    )
                settings[key], said[key] = value, override.match
        groups.setdefault(tuple(sorted(settings.items())), []).append(parameter)
    if unused:
        raise ConfigError(
            f"optim.overrides match no parameter: {', '.join(sorted(unused))}; "
            "patterns are over whole names, such as model.layers.0.self_attn.q_proj.weight"
        )
    return [{"params": members, **dict(settings)} for settings, members in groups.items()]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of every parameter, as ``optimizer.exp_avg.<name>``: what a checkpoint stores of the optimizer."""
    return {
        f"optimizer.{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        for moment in _MOMENTS
    }


def set_num_updates_(optimizer: torch.optim.Optimizer, num_updates: int) -> None:
    """Sets how many updates every moment has seen, which is what AdamW corrects its bias by."""
    for state in optimizer.state.values():
        state["step"].fill_(num_updates)
