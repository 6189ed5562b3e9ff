"""How far a run has come, and the version of all that a checkpoint holds besides tensors.

A state that an earlier version wrote is brought up step by step by the table of upgrades: a counter that is added, or
taken away, is an entry there, and old checkpoints stay readable.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from megalith.errors import CheckpointError

__all__ = ["STATE_VERSION", "TrainState", "upgraded"]

State = dict[str, Any]


def _without_consumed_tokens(state: State) -> State:
    """Tokens follow from the samples; the counter had left out those without a loss."""
    return {**state, "train": {name: value for name, value in state["train"].items() if name != "consumed_tokens"}}


# from version n to n + 1; the first version wrote no number
_UPGRADES: Mapping[int, Callable[[State], State]] = MappingProxyType({1: _without_consumed_tokens})
STATE_VERSION = max(_UPGRADES) + 1


@dataclass
class TrainState:
    """Counters that only grow. ``consumed_samples`` is the position in the data: the next sample's number."""

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0

    def state_dict(self) -> dict[str, int]:
        """The counters, by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``. Raises CheckpointError if it has other counters."""
        names = {field.name for field in fields(self)}
        if set(state) != names:
            raise CheckpointError(f"a run's counters are {sorted(names)}; the checkpoint has {sorted(state)}")
        for name in names:
            setattr(self, name, int(state[name]))


def upgraded(
    state: State, *, upgrades: Mapping[int, Callable[[State], State]] = _UPGRADES, wanted: int = STATE_VERSION
) -> State:
    """``state`` as this version writes it.

    Raises:
        CheckpointError: a later version wrote it.
    """
    version = int(state.get("version", 1))
    if version > wanted:
        raise CheckpointError(
            f"the checkpoint's state is of version {version} and this Megalith reads up to {wanted}; "
            "use the Megalith that wrote it, or a newer one"
        )
    for step in range(version, wanted):
        state = upgrades[step](state)
    return {**state, "version": wanted}
