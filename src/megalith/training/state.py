"""How far a run has come: everything that a checkpoint holds besides tensors."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from megalith.errors import CheckpointError

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """Counters that only grow. ``consumed_samples`` is the position in the data: the next sample's number."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
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
