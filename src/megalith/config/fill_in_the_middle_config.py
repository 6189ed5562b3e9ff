"""Which documents of a GPT's samples are split in three and reordered, and how the parts are marked."""

from typing import ClassVar

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["FillInTheMiddleConfig"]

_PUBLISHED = "null: found by its name in StarCoder, SantaCoder, Qwen or DeepSeek"


class FillInTheMiddleConfig(SettingsGroup):
    """Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255); a rate of 0.5 is usual."""

    dotted_name: ClassVar[str] = "data.fill_in_the_middle"

    rate: float = Field(gt=0, le=1, description="[share] of documents in a sample that are reordered", examples=[0.5])
    spm_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="[share] of these in which the suffix comes before the prefix (SPM); in the others the prefix "
        "comes first (PSM)",
    )
    prefix_token: str | None = Field(
        default=None, min_length=1, description=f"token before the prefix; {_PUBLISHED}", examples=["<fim_prefix>"]
    )
    middle_token: str | None = Field(
        default=None, min_length=1, description=f"token before the middle; {_PUBLISHED}", examples=["<fim_middle>"]
    )
    suffix_token: str | None = Field(
        default=None, min_length=1, description=f"token before the suffix; {_PUBLISHED}", examples=["<fim_suffix>"]
    )
