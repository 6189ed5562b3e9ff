"""Multi-token prediction: how many additional tokens are predicted in training, and the weight of their loss."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["MTPConfig"]


class MTPConfig(SettingsGroup):
    """Modules that predict the tokens after the next one (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2)."""

    dotted_name: ClassVar[str] = "model.mtp"

    num_modules: int = Field(
        default=1, ge=1, le=64, description="[modules] tokens predicted after the next one, each by its own layer"
    )
    loss_weight: float = Field(
        default=0.1, gt=0, description="[ratio] weight of the modules' mean loss relative to the main loss"
    )
