"""Clamp and offset of a gated activation."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["GluConfig"]


class GluConfig(SettingsGroup):
    """act(min(gate, clamp)) * (clip(up, -clamp, clamp) + offset); gpt-oss: quick_geglu with clamp 7 and offset 1."""

    dotted_name: ClassVar[str] = "model.glu"

    clamp: float | None = Field(
        default=None, gt=0, description="[value] upper bound of the gate, and bound of up on both sides; null: no bound"
    )
    offset: float = Field(default=0.0, description="[value] added to up after clamping")
