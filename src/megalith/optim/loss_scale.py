"""Dynamic loss scaling for float16 gradients: halves on overflow, doubles after a window without overflow.

Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740. Hysteresis is Megatron's: the scale is halved
only at the ``hysteresis``-th overflow and those after it, and the count is reset when the scale grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.storage import JsonFields

__all__ = ["DynamicLossScale", "checked_loss_scale_state"]


@dataclass
class DynamicLossScale:
    """The current scale and the counters that decide its next change.

    Args:
        scale: multiplies the loss; gradients are divided by it.
        window: steps without overflow after which the scale doubles.
        hysteresis: overflows that are needed before the scale halves.
        smallest: lower bound of the scale.
    """

    scale: float
    window: int
    hysteresis: int
    smallest: float = 1.0
    clean_steps: int = 0
    num_overflows: int = 0

    def update(self, overflowed: bool) -> None:
        """Updates the scale after a step."""
        if overflowed:
            self.clean_steps = 0
            self.num_overflows += 1
            if self.num_overflows >= self.hysteresis:
                self.scale = max(self.smallest, self.scale / 2.0)
            return
        self.clean_steps += 1
        if self.clean_steps >= self.window:  # a run may resume with a smaller window
            self.clean_steps = self.num_overflows = 0
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float]:
        """Returns what changes from step to step."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "borne": self.num_overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()``. Raises CheckpointError for anything else."""
        checked = checked_loss_scale_state(JsonFields(state, "loss_scale"))
        self.scale, self.clean_steps, self.num_overflows = checked["scale"], checked["clean_steps"], checked["borne"]


def checked_loss_scale_state(state: JsonFields) -> dict[str, Any]:
    """Returns ``state`` with all fields type-checked and no others. Raises CheckpointError naming the first bad one."""
    state.only("scale", "clean_steps", "borne")
    scale = state.number("scale")
    if scale == 0.0:
        raise state.wrong("scale", "above 0")  # gradients are divided by it
    return {"scale": scale, "clean_steps": state.count("clean_steps"), "borne": state.count("borne")}
