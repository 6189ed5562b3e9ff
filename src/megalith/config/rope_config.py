"""Settings of rotary positions."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from megalith.config.layer_pattern import LayerPattern, holds
from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["RopeConfig", "RopeScalingConfig"]


class RopeScalingConfig(SettingsGroup):
    """Rotary frequencies for rows longer than those that a model was first trained on."""

    dotted_name: ClassVar[str] = "model.rope.scaling"

    type: Literal["linear", "llama3", "yarn"] = Field(
        description="linear: all frequencies divided by factor (arXiv:2306.15595); llama3: slow ones (Llama 3.1, "
        "arXiv:2407.21783); yarn: slow ones, and sharper attention (arXiv:2309.00071)",
        examples=["llama3"],
    )
    factor: float = Field(ge=1, description="[ratio] that slow frequencies are divided by", examples=[8.0])
    original_max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] in rows before, over which rotations are counted; required",
    )
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="[rotations] of a pair, at most, for its frequency to be divided by factor"
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="[rotations] of a pair, at least, for its frequency to stay as it is"
    )
    beta_fast: float = Field(
        default=32.0, gt=0, description="[rotations] of a pair, at least, for its frequency to stay as it is"
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="[rotations] of a pair, at most, for its frequency to be divided by factor"
    )
    attention_factor: float | None = Field(
        default=None, gt=0, description="[factor] on cos and sin; null: 0.1 ln(factor) + 1, or that of both mscales"
    )
    mscale: float | None = Field(
        default=None, gt=0, description="[factor] m: cos and sin are multiplied by 0.1 m ln(factor) + 1"
    )
    mscale_all_dim: float | None = Field(
        default=None, gt=0, description="[factor] m: and divided by 0.1 m ln(factor) + 1 (DeepSeek-V2)"
    )
    truncate: bool = Field(default=True, description="the ramp between slow and fast goes from a whole pair to another")


class RopeConfig(SettingsGroup):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with position_embedding_type=rope."""

    dotted_name: ClassVar[str] = "model.rope"

    base: float = Field(
        default=10000.0,
        gt=1,
        description="[ratio] b: of R rotated features, pair i is rotated by b^(-2i/R) radians a token",
    )
    percent: float = Field(
        default=1.0, gt=0, le=1, description="[share] of a head's features that are rotated, the first ones"
    )
    interleaved: bool = Field(
        default=False, description="features 2i and 2i + 1 are a pair (GPT-J), and not i and i + R/2"
    )
    layers: LayerPattern | None = Field(
        default=None,
        description="which layers rotate, repeated from layer 0 on; the others see no positions; null: all of them",
        examples=[[True, True, True, False]],
    )
    local_base: float | None = Field(
        default=None, gt=1, description="[ratio] base in layers with model.attention.window, which are then not scaled"
    )
    sections: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None = Field(
        default=None,
        strict=False,
        description="[pairs] rotated by the time, height and width of a token (multimodal rope); text has one position "
        "for all three",
        examples=[[16, 24, 24]],
    )
    scaling: RopeScalingConfig | None = Field(default=None, description="frequencies for longer rows")

    def rotary_dim(self, head_size: int) -> int:
        """R: how many features of a head of ``head_size`` are rotated."""
        return int(head_size * self.percent)

    def rotates(self, layer_index: int) -> bool:
        """Whether the layer with this global index rotates queries and keys."""
        return self.layers is None or holds(self.layers, layer_index)
