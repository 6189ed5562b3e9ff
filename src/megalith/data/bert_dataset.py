"""BERT samples (Devlin et al. 2018, arXiv:1810.04805): masked words and sentence-order prediction.

    [CLS] A [SEP] B [SEP]

The sentences of a sample are split into A and B between two random sentences, and swapped with probability 1/2. The
binary head predicts the order (sentence order, Lan et al. 2019, arXiv:1909.11942). Excess tokens are removed one by one
from the longer segment, at a random end. Of the tokens to predict, 80 % are replaced by [MASK] and 10 % by a random
token, and 10 % are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.config.masking_config import MaskingConfig
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.masked_dataset import MaskedDataset
from megalith.data.special_tokens import bert_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.data.word_masks import WordMasking
from megalith.numerics.draws import Draws

__all__ = ["BertBatch", "BertDataset", "BertSample", "stack_bert_samples"]

Tokens = NDArray[np.int64]

_MAX_NGRAM = 3
_MASKED, _RANDOM = 0.8, 0.9  # thresholds of a uniform draw: below the first [MASK], below the second random


@dataclass(frozen=True)
class BertSample:
    """A row of S tokens, padded at the end.

    Attributes:
        tokens: int64 [S], the input of the model.
        labels: int64 [S], the original tokens.
        loss_mask: bool [S], True for the tokens to predict.
        token_types: int64 [S], 0 in [CLS] A [SEP] and in padding, 1 in B [SEP].
        num_tokens: number of tokens before padding.
        is_swapped: whether B comes before A in the text.
        is_truncated: whether tokens of the sentences were cut off.
    """

    tokens: Tokens
    labels: Tokens
    loss_mask: NDArray[np.bool_]
    token_types: Tokens
    num_tokens: int
    is_swapped: bool
    is_truncated: bool


@dataclass(frozen=True)
class BertBatch:
    """B rows for an encoder: whole rows, or this rank's columns of them.

    Attributes:
        tokens, token_types: int64 [B, S].
        labels: int64 [B, S], the token to predict at each position, or -1.
        num_tokens: int64 [B], lengths of whole rows before padding.
        classes: int64 [B], the class to predict from the row's first token; -1 if there is none, or if the first token
            is on another rank.
        row_ids: int64 [B], index of each row in the step's global batch.
        positions: int64 [S], index of each column in its row.
    """

    tokens: Tokens
    labels: Tokens
    token_types: Tokens
    num_tokens: Tokens
    classes: Tokens
    row_ids: Tokens
    positions: Tokens

    def columns(self, positions: Tokens) -> "BertBatch":
        """Selects the columns at ``positions`` of whole rows; without position 0, the classes are -1."""
        own = {name: getattr(self, name)[:, positions] for name in ("tokens", "labels", "token_types")}
        classes = self.classes if 0 in positions else np.full_like(self.classes, -1)
        return replace(self, positions=positions, classes=classes, **own)

    def counting(self, counted: Sequence[bool]) -> "BertBatch":
        """The same rows, without anything to predict in those that are not ``counted``."""
        kept = np.array(counted)
        return replace(self, labels=np.where(kept[:, None], self.labels, -1), classes=np.where(kept, self.classes, -1))


def stack_bert_samples(samples: Sequence[BertSample], row_ids: Sequence[int]) -> BertBatch:
    """Stacks samples into a batch, one per row; the class of a row is 1 if its segments are swapped, else 0."""
    return BertBatch(
        tokens=np.stack([sample.tokens for sample in samples]),
        labels=np.stack([np.where(sample.loss_mask, sample.labels, -1) for sample in samples]),
        token_types=np.stack([sample.token_types for sample in samples]),
        num_tokens=np.array([sample.num_tokens for sample in samples], np.int64),
        classes=np.array([sample.is_swapped for sample in samples], np.int64),
        row_ids=np.array(row_ids, np.int64),
        positions=np.arange(len(samples[0].tokens)),
    )


class BertDataset(MaskedDataset[BertSample]):
    """BERT samples of a dataset; see ``MaskedDataset`` for the other arguments and errors.

    Args:
        seq_length: S, including special tokens.
        sentence_order: samples have two segments; if False, one: [CLS] A [SEP].

    Raises:
        DataError: also if the tokenizer lacks one of BERT's special tokens.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        tokenizer: Tokenizer,
        seq_length: int,
        seed: int,
        masking: MaskingConfig,
        *,
        sentence_order: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self._special = bert_tokens(tokenizer)
        self._sentence_order = sentence_order
        super().__init__(
            dataset,
            tokenizer,
            room=seq_length - 3,
            min_sentences=2 if sentence_order else 1,
            masking=masking,
            word_masking=WordMasking(
                masking.probability,
                masking.max_ngram or _MAX_NGRAM,
                bool(masking.use_geometric_distribution),
                masking.whole_words,
            ),
            seed=seed,
            vocab_size=vocab_size,
        )

    def _sample(self, sentences: Sequence[Tokens], target: int, draws: Draws) -> BertSample:
        segments, is_swapped = self._segments(sentences, draws)
        kept = _truncated([len(segment) for segment in segments], target, draws)
        is_truncated = sum(map(len, segments)) > target
        segments = [segment[first:end] for segment, (first, end) in zip(segments, kept, strict=True)]
        special, separator = self._special, np.array([self._special.separator])
        pieces = [np.array([special.classifier])]
        for segment in segments:
            pieces += [segment, separator]
        labels = np.concatenate(pieces)
        types = np.repeat(np.arange(len(segments)), [len(segment) + 1 for segment in segments])
        is_text = (labels != special.classifier) & (labels != special.separator)
        loss_mask = np.zeros(len(labels), np.bool_)
        for first, end in self.word_masking.spans(self._word_starts(labels), is_text, target, draws):
            loss_mask[first:end] = True
        tokens = labels.copy()
        tokens[loss_mask] = self._replaced(labels[loss_mask], draws)
        missing = self.seq_length - len(labels)
        return BertSample(
            np.pad(tokens, (0, missing), constant_values=special.padding),
            np.pad(labels, (0, missing), constant_values=special.padding),
            np.pad(loss_mask, (0, missing)),
            np.pad(types, (1, missing)),  # [CLS] and padding have type 0
            len(labels),
            is_swapped,
            is_truncated,
        )

    def _segments(self, sentences: Sequence[Tokens], draws: Draws) -> tuple[list[Tokens], bool]:
        """A and B, or A alone, and whether B comes first in the text."""
        if not self._sentence_order:
            return [np.concatenate(sentences)], False
        pivot = 1 + draws.below(len(sentences) - 1)
        segments = [np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])]
        is_swapped = draws.chance(0.5)
        return (segments[::-1] if is_swapped else segments), is_swapped

    def _replaced(self, labels: Tokens, draws: Draws) -> Tokens:
        """The tokens that replace ``labels`` [T], drawn independently."""
        kind, place = draws.uniform(len(labels)), draws.uniform(len(labels))
        random = (place * self.tokenizer.vocab_size).astype(np.int64)
        return np.where(kind < _MASKED, self._special.mask, np.where(kind < _RANDOM, random, labels))


def _truncated(lengths: Sequence[int], target: int, draws: Draws) -> list[tuple[int, int]]:
    """The range [first, end) of each segment to keep, at most ``target`` tokens in total."""
    kept = [(0, length) for length in lengths]
    for from_front in (draws.uniform(max(0, sum(lengths) - target)) < 0.5).tolist():
        sizes = [end - first for first, end in kept]
        longer = 0 if sizes[0] > sizes[-1] else len(sizes) - 1
        first, end = kept[longer]
        kept[longer] = (first + 1, end) if from_front else (first, end - 1)
    return kept
