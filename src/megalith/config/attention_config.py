"""Settings of self-attention."""

from typing import ClassVar

from pydantic import Field

from megalith.config.layer_pattern import LayerPattern, holds
from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["AttentionConfig"]


class AttentionConfig(SettingsGroup):
    """Self-attention: what a query sees."""

    dotted_name: ClassVar[str] = "model.attention"

    window: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] that a query sees, its own included (sliding window); null: all up to its own",
        examples=[4096],
    )
    window_layers: LayerPattern | None = Field(
        default=None,
        description="which layers have the window, repeated from layer 0 on; null: all of them",
        examples=[[True, True, True, True, True, False]],
    )

    def window_of(self, layer_index: int) -> int | None:
        """The window of the layer with this global index; None if it has none."""
        if self.window_layers is None or holds(self.window_layers, layer_index):
            return self.window
        return None
