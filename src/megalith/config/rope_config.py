"""Settings of rotary position embedding."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from megalith.config.layer_pattern import LayerPattern, holds
from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["RopeConfig", "RopeScalingConfig"]


class RopeScalingConfig(SettingsGroup):
    """Scaling of rotary frequencies for sequences longer than those the model was first trained on."""

    dotted_name: ClassVar[str] = "model.rope.scaling"

    type: Literal["linear", "llama3", "yarn"] = Field(
        description="linear: all frequencies are divided by factor (arXiv:2306.15595); llama3: only slow ones (Llama "
        "3.1, arXiv:2407.21783); yarn: only slow ones, with sharper attention (arXiv:2309.00071)",
        examples=["llama3"],
    )
    factor: float = Field(ge=1, description="[ratio] by which frequencies are divided", examples=[8.0])
    original_max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] in the sequences of the original training, over which rotations are counted; required",
    )
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="[rotations] of a feature pair up to which its frequency is divided by factor"
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="[rotations] of a feature pair from which its frequency is unchanged"
    )
    beta_fast: float = Field(
        default=32.0, gt=0, description="[rotations] of a feature pair from which its frequency is unchanged"
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="[rotations] of a feature pair up to which its frequency is divided by factor"
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        description="[factor] on cos and sin; null: 0.1 ln(factor) + 1, or that of mscale and mscale_all_dim",
    )
    mscale: float | None = Field(
        default=None, gt=0, description="[factor] m: cos and sin are multiplied by 0.1 m ln(factor) + 1"
    )
    mscale_all_dim: float | None = Field(
        default=None, gt=0, description="[factor] m: cos and sin are divided by 0.1 m ln(factor) + 1 (DeepSeek-V2)"
    )
    truncate: bool = Field(
        default=True, description="round the ends of the ramp between slow and fast frequencies to whole pairs"
    )


class RopeConfig(SettingsGroup):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), used with position_embedding_type=rope."""

    dotted_name: ClassVar[str] = "model.rope"

    base: float = Field(
        default=10000.0,
        gt=1,
        description="[ratio] b: with R rotated features, pair i is rotated by b^(-2i/R) radians per token",
    )
    percent: float = Field(
        default=1.0, gt=0, le=1, description="[share] of a head's features that are rotated, from the first on"
    )
    interleaved: bool = Field(
        default=False, description="features 2i and 2i + 1 form a pair (GPT-J), instead of i and i + R/2"
    )
    layers: LayerPattern | None = Field(
        default=None,
        description="which layers use rope, repeated from layer 0 on; the others have no positions; null: all layers",
        examples=[[True, True, True, False]],
    )
    local_base: float | None = Field(
        default=None,
        gt=1,
        description="[ratio] base in layers with model.attention.window, whose frequencies are then not scaled",
    )
    sections: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None = Field(
        default=None,
        strict=False,
        description="[pairs] rotated by the time, height and width of a token (multimodal rope); for text all three "
        "are the same position",
        examples=[[16, 24, 24]],
    )
    scaling: RopeScalingConfig | None = Field(default=None, description="scaling of frequencies for longer sequences")

    def rotary_dim(self, head_size: int) -> int:
        """Returns R, the number of rotated features in a head of ``head_size``."""
        return int(head_size * self.percent)

    def rotates(self, layer_index: int) -> bool:
        """Whether the layer with this global index uses rope."""
        return self.layers is None or holds(self.layers, layer_index)
