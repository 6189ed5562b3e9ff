"""What a run asks of an optimizer, and which parameters it treats alike.

A new optimizer is a file beside ``adamw.py`` and a line in ``build.py``: a function of named parameters and settings.
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
    """Updates parameters, DTensors among them, from their gradients, each rank its own shards.

    ``param_groups`` are dicts as torch's optimizers have them, whose ``lr`` and ``weight_decay`` an
    OptimizerParamScheduler writes before each step.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> object:
        """One update of every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Drops all gradients."""

    def tensors(self) -> dict[str, Tensor]:
        """Its state as checkpoints hold it, ``optimizer.<what>.<parameter>``; allocated from the start."""

    def set_num_updates_(self, num_updates: int) -> None:
        """Says how many updates the state has seen, after it was read from a checkpoint."""


BuildOptimizer = Callable[[NamedParameters, OptimConfig], Optimizer]


def decaying_groups(parameters: NamedParameters, config: OptimConfig) -> list[dict[str, Any]]:
    """``parameter_groups``, each with the weight decay that it begins with. Raises as that does."""
    groups = parameter_groups(parameters, config.overrides)
    return [{**group, "weight_decay": config.weight_decay * group.get("wd_mult", 1.0)} for group in groups]


def matches(override: ParamGroupOverride, parameters: NamedParameters) -> bool:
    """Whether ``override`` is for any of ``parameters``."""
    return any(fnmatchcase(name, override.match) for name, _ in parameters)


def parameter_groups(parameters: NamedParameters, overrides: Sequence[ParamGroupOverride]) -> list[dict[str, Any]]:
    """Named parameters by what they share: ``wd_mult`` (0 for vectors and all biases; else 1) and overrides.

    An override's ``match`` is a shell pattern over the whole name: ``*.bias``, ``model.embed_tokens.*``.

    Raises:
        ConfigError: an override matches nothing, or two that match one parameter disagree.
    """
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    unused = {override.match for override in overrides}
    for name, parameter in parameters:
        is_bias = name.endswith("bias")  # those of experts are packed, and no vectors
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
