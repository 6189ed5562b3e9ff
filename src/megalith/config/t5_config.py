"""T5: an encoder, and a decoder with cross-attention to it."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["T5Config"]


class T5Config(SettingsGroup):
    """A bidirectional encoder of model.num_layers layers, and a decoder with cross-attention (arXiv:1910.10683).

    The published models have attention.scale=1; with tied embeddings multipliers.logits is 1 / sqrt(hidden_size).
    """

    dotted_name: ClassVar[str] = "model.t5"

    num_decoder_layers: int = Field(
        ge=1,
        le=10_000,
        description="[layers] of the decoder; model.num_layers counts those of the encoder",
        examples=[12],
    )
