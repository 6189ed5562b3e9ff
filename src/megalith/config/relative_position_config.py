"""Relative positions as a bias on attention scores, learned by distance."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["RelativePositionConfig"]


class RelativePositionConfig(SettingsGroup):
    """The bias of T5 (arXiv:1910.10683, section 2.1): one learned number per head and bucket of distances."""

    dotted_name: ClassVar[str] = "model.relative_position"

    num_buckets: int = Field(
        default=32, ge=4, le=LARGEST_SIZE, description="[buckets] of distances; an encoder uses half for each direction"
    )
    max_distance: int = Field(
        default=128, ge=2, le=LARGEST_SIZE, description="[tokens] distance from which on all share the last bucket"
    )
