"""Features that may still change: off by default, each enabled by its name in ``experimental``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from megalith.errors import ExperimentalError

__all__ = ["FEATURES", "USED_BY", "refusal", "require"]

FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "compile": "torch.compile of the transformer layers",
        "fp8": "FP8 training, not yet run on a GPU",
        "deep_ep": "DeepEP's fused dispatch and combine, not yet tested on several GPUs",
        "symmetric_memory": "dispatch and combine through torch's symmetric memory, not yet tested on several GPUs",
    }
)


class Use(NamedTuple):
    """A setting and the value with which it uses a feature."""

    setting: str
    value: bool | str

    def __str__(self) -> str:
        return f"{self.setting}={'true' if self.value is True else self.value}"


# without it, naming the feature in `experimental` would have no effect
USED_BY: Mapping[str, Use] = MappingProxyType(
    {
        "compile": Use("train.compile", True),
        "fp8": Use("precision.fp8.recipe", "blockwise"),
        "deep_ep": Use("parallel.dispatch.method", "flex"),
        "symmetric_memory": Use("parallel.dispatch.method", "symmetric"),
    }
)


class HasExperimental(Protocol):
    """What ``require`` needs from a run's settings."""

    @property
    def experimental(self) -> tuple[str, ...]: ...


def require(feature: str, config: HasExperimental) -> None:
    """Raises ExperimentalError unless ``feature``, a name in FEATURES, is enabled in ``config``."""
    assert feature in FEATURES, f"{feature!r} is not in FEATURES"
    if feature not in config.experimental:
        raise ExperimentalError(f"{refusal(feature)}; use experimental=[{', '.join((*config.experimental, feature))}]")


def refusal(feature: str) -> str:
    """Returns why ``feature`` cannot be used unless it is named, without the suggested fix."""
    return f"{USED_BY[feature]} is experimental ({FEATURES[feature]}) and must be named in `experimental`"
