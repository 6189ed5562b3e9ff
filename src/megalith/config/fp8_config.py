"""FP8 training: the recipe, and what is left out of it."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["FP8Config"]


class FP8Config(SettingsGroup):
    """FP8 GEMMs in the linear layers of transformer layers; experts, router and output projection have none."""

    dotted_name: ClassVar[str] = "precision.fp8"

    recipe: Literal["blockwise"] = Field(
        description="blockwise: a scale per 128 numbers (DeepSeek-AI 2024, arXiv:2412.19437) (experimental: fp8)",
        examples=["blockwise"],
    )
    wgrad: bool = Field(default=True, description="also compute the gradients of weights in FP8")
    num_layers_at_start_in_bf16: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="[layers] at the start of each stack that stay in precision.dtype"
    )
    num_layers_at_end_in_bf16: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="[layers] at the end of each stack that stay in precision.dtype"
    )
