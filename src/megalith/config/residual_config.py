"""The residual stream: where it is normalised, how, and how precisely it is kept."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["ResidualConfig"]


class ResidualConfig(SettingsGroup):
    """The residual stream of the layers."""

    dotted_name: ClassVar[str] = "model.residual"

    norm_placement: Literal["pre", "post", "sandwich"] = Field(
        default="pre",
        description="norms before attention and MLP; after each residual sum (the original transformer), with none at "
        "the end of the model; or before and after attention and MLP (Gemma 2)",
    )
    zero_centered_norm: bool = Field(
        default=False, description="gains of norms are 1 + weight, and weights start at 0 (Gemma, Nemotron)"
    )
    fp32: bool = Field(
        default=False, description="the sums are kept in float32 between layers, whatever precision.dtype is"
    )
    embedding_dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="[probability] of dropping a feature of the embedding; null: hidden_dropout",
    )
