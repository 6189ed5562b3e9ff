"""Which tokens of a sample are masked, for models that are trained to predict masked tokens."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["LongSentences", "MaskingConfig"]

LongSentences = Literal["refuse", "cut", "skip"]


class MaskingConfig(SettingsGroup):
    """Masking of words for BERT and of spans for T5; the defaults are the usual ones."""

    dotted_name: ClassVar[str] = "data.masking"

    probability: float = Field(default=0.15, gt=0, lt=1, description="[share] of a sample's tokens that are masked")
    max_ngram: int | None = Field(
        default=None, ge=1, le=LARGEST_SIZE, description="[words] masked in a row at most; null: 3 for BERT, 10 for T5"
    )
    use_geometric_distribution: bool | None = Field(
        default=None,
        description="draw the number n of words in a row from a geometric distribution with p = 0.2, clipped to "
        "max_ngram, instead of in proportion to 1 / n; null: for T5 only",
    )
    whole_words: bool = Field(default=True, description="mask whole words instead of single tokens")
    short_sequence_probability: float = Field(
        default=0.1, ge=0, le=1, description="[share] of samples that get a random shorter length"
    )
    long_sentences: LongSentences = Field(
        default="refuse",
        description="what to do with sentences longer than a sample: raise an error, cut them into pieces, or skip "
        "their documents and log how many",
    )
