"""Which tokens of a sample are masked, for models that learn to fill in what is missing."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["MaskingConfig"]


class MaskingConfig(SettingsGroup):
    """Masked words of BERT and spans of T5; defaults are the field's."""

    dotted_name: ClassVar[str] = "data.masking"

    probability: float = Field(default=0.15, gt=0, lt=1, description="[share] of a sample's tokens that are masked")
    max_ngram: int | None = Field(
        default=None, ge=1, le=LARGEST_SIZE, description="[words] masked in a row, at most; null: 3 for BERT, 10 for T5"
    )
    use_geometric_distribution: bool | None = Field(
        default=None,
        description="words in a row by the geometric distribution of 0.2, cut off at max_ngram, rather than by 1 / n; "
        "null: for T5",
    )
    whole_words: bool = Field(default=True, description="words are masked as a whole, rather than single tokens")
    short_sequence_probability: float = Field(
        default=0.1, ge=0, le=1, description="[share] of samples that are given a random, shorter length"
    )
    long_sentences: Literal["refuse", "cut", "skip"] = Field(
        default="refuse",
        description="sentences that are longer than a sample: an error, or cut into pieces, or their whole documents "
        "left out and counted in the log",
    )
