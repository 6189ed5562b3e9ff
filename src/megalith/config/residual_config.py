"""The residual stream: where and how it is normalized, and in which precision it is kept."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["ResidualConfig"]


class ResidualConfig(SettingsGroup):
    """The residual stream of the layers."""

    dotted_name: ClassVar[str] = "model.residual"

    norm_placement: Literal["pre", "post", "sandwich"] = Field(
        default="pre",
        description="norms before attention and MLP; after each residual sum (the original transformer), without one "
        "at the end of the model; or before and after attention and MLP (Gemma 2)",
    )
    zero_centered_norm: bool = Field(
        default=False, description="norms scale by 1 + weight, with weights initialized to 0 (Gemma, Nemotron)"
    )
    fp32: bool = Field(
        default=False, description="keep the residual stream in float32 between layers, regardless of precision.dtype"
    )
    embedding_dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="[probability] of dropping a feature of the embedding; null: hidden_dropout",
    )
