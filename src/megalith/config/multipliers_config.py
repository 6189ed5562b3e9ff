"""Constant factors in the model, and the soft cap of the logits."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["MultipliersConfig"]


class MultipliersConfig(SettingsGroup):
    """Constant factors in the model, as in Gemma and Granite; model.mup also scales with the width."""

    dotted_name: ClassVar[str] = "model.multipliers"

    embedding: float = Field(
        default=1.0,
        gt=0,
        description="[factor] on token embeddings, before positions are added; Gemma: sqrt(hidden_size)",
    )
    residual: float = Field(
        default=1.0, gt=0, description="[factor] on what attention and MLP add to the residual stream"
    )
    logits: float = Field(default=1.0, gt=0, description="[factor] on the logits; Granite: 1 / logits_scaling")
    logit_softcap: float | None = Field(
        default=None, gt=0, description="[logit] bound c: logits x become c tanh(x / c) (Gemma 2); null: none"
    )
