"""The scale that keeps float16 gradients away from zero: it halves on overflow and doubles after a clean stretch.

Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740. Hysteresis is Megatron's: the first overflows
of a stretch are borne, and the count is refilled when the scale grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.storage import JsonFields

__all__ = ["DynamicLossScale", "checked_loss_scale_state"]


@dataclass
class DynamicLossScale:
    """The scale now, and how near it is to its next change.

    Args:
        scale: multiplies the loss; gradients are divided by it again.
        window: steps without overflow after which the scale doubles.
        hysteresis: overflows that are needed before the scale halves.
        smallest: the scale never goes below it.
    """

    scale: float
    window: int
    hysteresis: int
    smallest: float = 1.0
    clean_steps: int = 0
    borne: int = 0

    def update(self, overflowed: bool) -> None:
        """Takes in what became of a step."""
        if overflowed:
            self.clean_steps = 0
            self.borne += 1
            if self.borne >= self.hysteresis:
                self.scale = max(self.smallest, self.scale / 2.0)
            return
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = self.borne = 0
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float]:
        """What changes from step to step."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "borne": self.borne}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state_dict()``. Raises CheckpointError for anything else."""
        checked = checked_loss_scale_state(JsonFields(state, "loss_scale"))
        self.scale, self.clean_steps, self.borne = checked["scale"], checked["clean_steps"], checked["borne"]


def checked_loss_scale_state(state: JsonFields) -> dict[str, Any]:
    """``state``, with every field of its type and no other. Raises CheckpointError naming the first that is not."""
    state.only("scale", "clean_steps", "borne")
    scale = state.number("scale")
    if scale == 0.0:
        raise state.wrong("scale", "above 0")  # gradients are divided by it
    return {"scale": scale, "clean_steps": state.count("clean_steps"), "borne": state.count("borne")}
