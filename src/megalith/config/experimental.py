"""Features that may still change: off by default, each switched on by its own name in ``experimental``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from megalith.errors import ExperimentalError

__all__ = ["FEATURES", "USED_BY", "refusal", "require"]

FEATURES: Mapping[str, str] = MappingProxyType({"compile": "torch.compile of the transformer layers"})

# the switch that puts a feature to use; with it off, naming the feature in `experimental` would have no effect
USED_BY: Mapping[str, str] = MappingProxyType({"compile": "train.compile"})


class HasExperimental(Protocol):
    """What ``require`` needs of a run's settings."""

    @property
    def experimental(self) -> tuple[str, ...]: ...


def require(feature: str, config: HasExperimental) -> None:
    """Passes if ``feature``, a name in FEATURES, is switched on in ``config``; raises ExperimentalError if not."""
    assert feature in FEATURES, f"{feature!r} is not in FEATURES"
    if feature not in config.experimental:
        raise ExperimentalError(f"{refusal(feature)}; use experimental=[{', '.join((*config.experimental, feature))}]")


def refusal(feature: str) -> str:
    """Why ``feature`` cannot be used unnamed, without the way out."""
    return f"{USED_BY[feature]} is experimental ({FEATURES[feature]}) and must be named in `experimental`"
