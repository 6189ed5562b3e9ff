"""The datasets of a run, and how samples are made from them."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from megalith.config.fill_in_the_middle_config import FillInTheMiddleConfig
from megalith.config.masking_config import MaskingConfig
from megalith.config.settings_group import LARGEST_COUNT, LARGEST_SIZE, FilePath, SettingsGroup

__all__ = [
    "PREFIX_KINDS",
    "PREFIX_SETTINGS",
    "BlendPhaseConfig",
    "DataConfig",
    "LongConversations",
    "train_setting",
    "valid_setting",
]

LongConversations = Literal["refuse", "cut", "skip"]


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError("must be a name made of letters, digits, _ and -")
    return name


# the forms that data.train and data.valid may take; the tag makes pydantic report errors about the form that was given
PREFIX_KINDS = ("prefix", "named prefixes")
PREFIX_SETTINGS = ("data.train", "data.valid")
_Name = Annotated[str, AfterValidator(_plain_name)]
_NamedPrefixes = Annotated[Mapping[_Name, FilePath], Field(min_length=1)]
_Prefixes = Annotated[
    Annotated[FilePath, Tag(PREFIX_KINDS[0])] | Annotated[_NamedPrefixes, Tag(PREFIX_KINDS[1])],
    Discriminator(lambda given: PREFIX_KINDS[isinstance(given, Mapping)]),
]
_Weights = Mapping[str, Annotated[float, Field(ge=0)]]


class BlendPhaseConfig(SettingsGroup):
    """Weights that apply from a given sample on."""

    first_sample: int = Field(
        ge=1, le=LARGEST_COUNT, description="[samples] that precede the first one with these weights", examples=[100000]
    )
    weights: _Weights = Field(description="[ratio] of samples by dataset, as in data.weights")


class DataConfig(SettingsGroup):
    """The datasets and how samples are made from them. A dataset is a pair of files, PREFIX.bin and PREFIX.idx."""

    dotted_name: ClassVar[str] = "data"

    train: _Prefixes | None = Field(
        default=None, description="prefix of the dataset to train on, or several to blend, by name: {web: PREFIX, ...}"
    )
    weights: _Weights | None = Field(
        default=None,
        description="[ratio] in which samples are drawn from several datasets: {web: 0.7, code: 0.3}; null: that of "
        "their sizes",
    )
    phases: tuple[BlendPhaseConfig, ...] = Field(
        default=(), strict=False, description="other weights from later samples on"
    )
    valid: _Prefixes | None = Field(
        default=None, description="prefix of the dataset to evaluate on, or several by name: {web: PREFIX, ...}"
    )
    tokenizer: FilePath | None = Field(
        default=None, description="path to a tokenizer.json; null: the one that the dataset names"
    )
    seq_length: int = Field(ge=1, le=LARGEST_SIZE, description="[tokens] in a sample", examples=[1024])
    reset_attention_mask: bool = Field(
        default=False, description="documents within a sample do not attend to each other"
    )
    reset_position_ids: bool = Field(default=False, description="position ids restart at 0 in every document")
    eod_mask_loss: bool = Field(default=False, description="mask the loss where the input token ends a document")
    long_conversations: LongConversations | None = Field(
        default=None,
        description="what to do with conversations longer than a sample: raise an error (refuse; also null), cut off "
        "their end, or skip them; the last two log how many",
    )
    fill_in_the_middle: FillInTheMiddleConfig | None = Field(
        default=None, description="fill-in-the-middle training of a GPT: some documents are reordered"
    )
    masking: MaskingConfig | None = Field(
        default=None, description="which tokens are masked for a BERT or a T5 to predict"
    )
    num_negatives: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="[passages] per query that are hard negatives, drawn from those in the dataset",
    )
    query_in_block_probability: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="[probability] that a block has its query too, when pairs are made from text (inverse cloze task); "
        "null: 0.1",
    )
    decoder_seq_length: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] of a T5's decoder in a sample; null: enough for any sample, as a multiple of 16",
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a mapping is not hashable

    @property
    def valid_sets(self) -> Mapping[str, str]:
        """The prefixes of ``valid`` by name, in the order given; a single prefix has the name ""."""
        return _by_name(self.valid)

    @property
    def train_sets(self) -> Mapping[str, str]:
        """The prefixes of ``train`` by name, as in ``valid_sets``."""
        return _by_name(self.train)


def train_setting(set_name: str) -> str:
    """Returns the setting that holds a training set's prefix: data.train, or data.train.web for the set ``web``."""
    return f"data.train.{set_name}" if set_name else "data.train"


def valid_setting(set_name: str) -> str:
    """Returns the setting that holds a validation set's prefix, as ``train_setting`` does."""
    return f"data.valid.{set_name}" if set_name else "data.valid"


def _by_name(prefixes: str | Mapping[str, str] | None) -> Mapping[str, str]:
    if prefixes is None:
        return MappingProxyType({})
    return MappingProxyType({"": prefixes} if isinstance(prefixes, str) else dict(prefixes))
