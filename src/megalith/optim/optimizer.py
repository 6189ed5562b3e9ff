"""The optimizer protocol of a run, and how parameters are grouped.

To add an optimizer, add a file beside ``adamw.py`` with a function of named parameters and settings, and a line in
``build.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn

from megalith.config import OptimConfig, ParamGroupOverride
from megalith.errors import ConfigError

__all__ = ["BuildOptimizer", "NamedParameters", "Optimizer", "decaying_groups", "matches", "parameter_groups"]

_OVERRIDABLE = ("max_lr", "min_lr", "wd_mult")

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Optimizer(Protocol):
    """Updates parameters, including DTensors, from their gradients; each rank updates its own shards.

    ``param_groups`` are dicts as in torch's optimizers, whose ``lr`` and ``weight_decay`` an OptimizerParamScheduler
    writes before each step.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> object:
        """Updates every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Drops all gradients."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state under its checkpoint names, ``optimizer.<what>.<parameter>``; allocated from the start."""

    def set_num_updates_(self, num_updates: int) -> None:
        """Sets the number of updates that the state has seen, after loading it from a checkpoint."""


BuildOptimizer = Callable[[NamedParameters, OptimConfig], Optimizer]


def decaying_groups(parameters: NamedParameters, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns ``parameter_groups`` with the initial weight decay of each group. Raises as ``parameter_groups``."""
    groups = parameter_groups(parameters, config.overrides)
    return [{**group, "weight_decay": config.weight_decay * group.get("wd_mult", 1.0)} for group in groups]


def matches(override: ParamGroupOverride, parameters: NamedParameters) -> bool:
    """Returns whether ``override`` matches any of ``parameters``."""
    return any(fnmatchcase(name, override.match) for name, _ in parameters)


def parameter_groups(parameters: NamedParameters, overrides: Sequence[ParamGroupOverride]) -> list[dict[str, Any]]:
    """Groups named parameters by ``wd_mult`` (0 for vectors and all biases, otherwise 1) and overrides.

    An override's ``match`` is a shell pattern over the whole name: ``*.bias``, ``model.embed_tokens.*``.

    Raises:
        ConfigError: an override matches nothing, or two overrides of one parameter disagree.
    """
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    unused = {override.match for override in overrides}
    for name, parameter in parameters:
        is_bias = name.endswith("bias")  # the biases of experts are packed, and not vectors
        settings = {"wd_mult": 0.0 if parameter.dim() == 1 or is_bias else 1.0}
        said: dict[str, str] = {}
        for override in (override for override in overrides if fnmatchcase(name, override.match)):
            unused.discard(override.match)
            for key in _OVERRIDABLE:
                value = getattr(override, key)
                if value is None:
                    continue
                if key in said and settings[key] != value:
                    raise ConfigError(
                        f"optim.overrides disagree on {key} of {name}: {said[key]!r} sets {settings[key]}, "
                        f"{override.match!r} sets {value}; make one of the patterns narrower"
                    )
                settings[key], said[key] = value, override.match
        groups.setdefault(tuple(sorted(settings.items())), []).append(parameter)
    if unused:
        raise ConfigError(
            f"optim.overrides match no parameter: {', '.join(sorted(unused))}; "
            "patterns must match whole names, such as model.layers.0.self_attn.q_proj.weight"
        )
    return [{"params": members, **dict(settings)} for settings, members in groups.items()]
