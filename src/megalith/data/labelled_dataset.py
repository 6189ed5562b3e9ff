"""Classification samples: a text between BERT's special tokens, [CLS] text [SEP], and its class.

Epoch e visits the texts in an order keyed by (seed, e), so sample i depends only on (data, tokenizer, seed, i).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.bert_dataset import BertBatch
from megalith.data.class_names import identity_of_classes
from megalith.data.conversations import require_text
from megalith.data.fingerprint import fingerprint
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.labelled import Labels
from megalith.data.special_tokens import bert_tokens
from megalith.data.token_ids import check_sample
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.numerics.permutation import KeyedPermutation

__all__ = ["LabelledDataset", "LabelledText", "LabelledTexts", "stack_labelled_texts"]


@dataclass(frozen=True)
class LabelledText:
    """``tokens``: int64 [N], including special tokens; ``label``: index of its class."""

    tokens: NDArray[np.int64]
    label: int


def stack_labelled_texts(
    samples: Sequence[LabelledText], row_ids: Sequence[int], seq_length: int, padding: int
) -> BertBatch:
    """Stacks samples into a batch, one per row, padded to ``seq_length`` with the token ``padding``."""
    tokens = np.full((len(samples), seq_length), padding, np.int64)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample.tokens)] = sample.tokens
    return BertBatch(
        tokens=tokens,
        labels=np.full_like(tokens, -1),
        token_types=np.zeros_like(tokens),
        num_tokens=np.array([len(sample.tokens) for sample in samples], np.int64),
        classes=np.array([sample.label for sample in samples], np.int64),
        row_ids=np.array(row_ids, np.int64),
        positions=np.arange(seq_length),
    )


class LabelledTexts:
    """The texts of a dataset once, in file order.

    Args:
        dataset: prefix of a dataset written by ``data.labelled``.
        tokenizer: the tokenizer that encoded the dataset.
        seq_length: maximum number of tokens in a sample, including special tokens.
        vocab_size: vocabulary size of the model that reads the samples; None: unknown.

    Attributes:
        classes: names of the classes.

    Raises:
        ConfigError: a sample has no room for text.
        DataError: the files cannot be read, have no classes, or a text is longer than a sample; or the tokenizer lacks
            one of BERT's special tokens.
    """

    def __init__(
        self, dataset: str | Path, tokenizer: Tokenizer, seq_length: int, *, vocab_size: int | None = None
    ) -> None:
        if seq_length < 3:
            raise ConfigError(
                f"data.seq_length must be at least 3, for text between [CLS] and [SEP]; got {seq_length}; use 128"
            )
        self.special = bert_tokens(tokenizer)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._data = IndexedDataset(dataset)
        self._data.require_token_ids()
        require_text(self._data)
        self._starts = self._data.document_starts()
        found = Labels.read(dataset, self._data.num_documents)
        self.classes, self.labels = found.classes, found.labels
        lengths, room = np.diff(self._starts), seq_length - 2
        if len(lengths) and lengths.max() > room:
            raise DataError(
                f"texts of {dataset} must have at most {room} tokens to fit in a sample; text "
                f"{int(np.argmax(lengths > room))} has {lengths[np.argmax(lengths > room)]}; increase data.seq_length, "
                f"or truncate long texts with: megalith data label ... --max-tokens {room}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> LabelledText:
        """Text ``index``. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"texts are numbered 0 to {len(self) - 1}; got {index}")
        first, end = int(self._starts[index]), int(self._starts[index + 1])
        text = self._data.tokens[first:end]
        check_sample(self._data, index, first, text, self._vocab_size)
        tokens = np.concatenate(([self.special.classifier], text.astype(np.int64), [self.special.separator]))
        return LabelledText(tokens, int(self.labels[index]))

    def identity(self) -> dict[str, Any]:
        """Fingerprints of texts and labels, the SHA-256 of the tokenizer file, and the class names."""
        return {
            "text": fingerprint(self._data.tokens, self._starts),
            "labels": fingerprint(self.labels, np.arange(len(self.labels) + 1)),
            "tokenizer": self._tokenizer.sha256,
            **identity_of_classes(self.classes),
        }


class LabelledDataset:
    """``texts`` repeated without end: every index from 0 on is valid.

    Raises:
        DataError: a class has no text.
    """

    def __init__(self, texts: LabelledTexts, seed: int) -> None:
        self.texts, self._seed = texts, seed
        missing = np.flatnonzero(np.bincount(texts.labels, minlength=len(texts.classes)) == 0)
        if len(missing):
            raise DataError(
                f"every class must have at least one training text; {texts.classes[missing[0]]!r} has none; add some, "
                "or remove the class"
            )

    def __getitem__(self, index: int) -> LabelledText:
        """Sample ``index``, from 0 on. Raises IndexError below 0."""
        if index < 0:
            raise IndexError(f"samples are numbered from 0; got {index}")
        epoch, place = divmod(index, len(self.texts))
        return self.texts[KeyedPermutation(len(self.texts), self._seed, f"texts-{epoch}")(place)]

    def identity(self) -> dict[str, Any]:
        """The identity of the texts."""
        return self.texts.identity()
