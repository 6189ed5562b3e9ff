"""The maximal update parametrization, muP: the width at which a model's hyperparameters were tuned."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["MuPConfig"]


class MuPConfig(SettingsGroup):
    """muP (Yang et al. 2022, arXiv:2203.03466, table 8): hyperparameters tuned at one width transfer to any other.

    Initial weights, attention, logits and AdamW scale with hidden_size / base_hidden_size; see docs/mup.md.
    """

    dotted_name: ClassVar[str] = "model.mup"

    base_hidden_size: int = Field(
        ge=1,
        le=LARGEST_SIZE,
        description="[features] hidden_size of the model that init_method_std, the multipliers and optim were tuned "
        "for; all widths of a layer grow in proportion",
        examples=[256],
    )
    base_kv_channels: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[features] kv_channels of that model, if heads grow with the width; null: as in this model",
    )
