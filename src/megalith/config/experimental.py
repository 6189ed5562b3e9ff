"""Features that may still change: off by default, each switched on by its own name in ``experimental``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from megalith.errors import ExperimentalError

__all__ = ["FEATURES", "USED_BY", "refusal", "require"]

FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "compile": "torch.compile of the transformer layers",
        "deep_ep": "DeepEP's fused dispatch and combine, never run on several GPUs here",
        "symmetric_memory": "dispatch and combine through torch's symmetric memory, never run on several GPUs here",
    }
)


class Use(NamedTuple):
    """The value of a setting that puts a feature to use."""

    setting: str
    value: bool | str

    def __str__(self) -> str:
        return f"{self.setting}={'true' if self.value is True else self.value}"


# without it, naming the feature in `experimental` would have no effect
USED_BY: Mapping[str, Use] = MappingProxyType(
    {
        "compile": Use("train.compile", True),
        "deep_ep": Use("parallel.dispatch.method", "flex"),
        "symmetric_memory": Use("parallel.dispatch.method", "symmetric"),
    }
)


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
