"""T5 samples: the span-corruption objective (Raffel et al. 2019, arXiv:1910.10683, section 3.1.4).

    encoder   Thank you <extra_id_0> me to your <extra_id_1> week. </s>
    decoder   <pad> <extra_id_0> for inviting <extra_id_1> party last
    labels    <extra_id_0> for inviting <extra_id_1> party last </s>

Spans follow Megatron: runs of whole words, by default geometric(0.2) in number and at most 10. Spans may be adjacent.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.config.masking_config import MaskingConfig
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.masked_dataset import MaskedDataset
from megalith.data.special_tokens import T5Tokens, t5_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.data.word_masks import SpanLimits, WordMasking, ngram_distribution
from megalith.errors import ConfigError
from megalith.numerics.draws import Draws

__all__ = ["T5Batch", "T5Dataset", "T5Sample", "decoder_length", "fill_spans", "stack_t5_samples"]

log = logging.getLogger(__name__)
Tokens = NDArray[np.int64]

_MAX_NGRAM = 10


@dataclass(frozen=True)
class T5Sample:
    """A row of S tokens for the encoder and one of T for the decoder, both padded at the end.

    Attributes:
        tokens: int64 [S].
        decoder_tokens, labels: int64 [T]; labels are the next token after each decoder token.
        loss_mask: bool [T], False in padding.
        num_tokens, num_decoder_tokens: row lengths before padding.
        is_truncated: whether tokens of the sentences were cut off.
    """

    tokens: Tokens
    decoder_tokens: Tokens
    labels: Tokens
    loss_mask: NDArray[np.bool_]
    num_tokens: int
    num_decoder_tokens: int
    is_truncated: bool


@dataclass(frozen=True)
class T5Batch:
    """B rows for the encoder and decoder: whole rows, or this rank's columns of them.

    Attributes:
        tokens: int64 [B, S].
        decoder_tokens, labels: int64 [B, T]; loss_mask: bool [B, T].
        num_tokens, num_decoder_tokens: int64 [B], lengths of whole rows before padding.
        row_ids: int64 [B], index of each row in the step's global batch.
        positions, decoder_positions: int64 [S] and [T], index of each column in its row.
    """

    tokens: Tokens
    decoder_tokens: Tokens
    labels: Tokens
    loss_mask: NDArray[np.bool_]
    num_tokens: Tokens
    num_decoder_tokens: Tokens
    row_ids: Tokens
    positions: Tokens
    decoder_positions: Tokens

    def columns(self, positions: Tokens, decoder_positions: Tokens) -> "T5Batch":
        """Selects the columns at these positions of whole rows."""
        of_decoder = {
            name: getattr(self, name)[:, decoder_positions] for name in ("decoder_tokens", "labels", "loss_mask")
        }
        tokens = self.tokens[:, positions]
        return replace(self, tokens=tokens, positions=positions, decoder_positions=decoder_positions, **of_decoder)


def stack_t5_samples(samples: Sequence[T5Sample], row_ids: Sequence[int]) -> T5Batch:
    """Stacks samples into a batch, one per row."""
    return T5Batch(
        np.stack([sample.tokens for sample in samples]),
        np.stack([sample.decoder_tokens for sample in samples]),
        np.stack([sample.labels for sample in samples]),
        np.stack([sample.loss_mask for sample in samples]),
        np.array([sample.num_tokens for sample in samples], np.int64),
        np.array([sample.num_decoder_tokens for sample in samples], np.int64),
        np.array(row_ids, np.int64),
        np.arange(len(samples[0].tokens)),
        np.arange(len(samples[0].decoder_tokens)),
    )


def fill_spans(sample: T5Sample, special: T5Tokens) -> tuple[Tokens, NDArray[np.bool_]]:
    """Reconstructs the text: the encoder's row before padding, with each sentinel replaced by its span in the labels.

    A sentinel that is not in the labels is kept.

    Returns:
        int64 [N], the text and the end token; bool [N], which tokens belong to spans.
    """
    learned = sample.labels[: sample.num_decoder_tokens - 1]  # without the end token
    begins = np.flatnonzero(np.isin(learned, special.sentinels))
    spans = {int(span[0]): span[1:] for span in np.split(learned, begins)[1:]}
    read = sample.tokens[: sample.num_tokens].tolist()
    pieces = [spans.get(token, np.array([token])) for token in read]
    return np.concatenate(pieces), np.repeat([token in spans for token in read], list(map(len, pieces)))


def decoder_length(seq_length: int, probability: float) -> int:
    """The maximum length of the decoder's row: every masked token is a span of its own, plus the end token."""
    return 2 * max(1, round((seq_length - 1) * probability)) + 1


class T5Dataset(MaskedDataset[T5Sample]):
    """T5 samples of a dataset; see ``MaskedDataset`` for the other arguments and errors.

    If a sample would have more spans than there are sentinels, or than the decoder has room for, fewer are masked. A
    warning is logged if that is likely to be common.

    Args:
        seq_length: S, the length of the encoder's rows.
        decoder_seq_length: T; ``decoder_length`` is always enough.

    Raises:
        ConfigError: also if the decoder has no room for the masked tokens of a full sample, a sentinel and the end.
        DataError: also if the tokenizer lacks one of T5's special tokens.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        tokenizer: Tokenizer,
        seq_length: int,
        decoder_seq_length: int,
        seed: int,
        masking: MaskingConfig,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.decoder_seq_length = decoder_seq_length
        self._special = t5_tokens(tokenizer)
        least = round((seq_length - 1) * masking.probability) + 2
        if decoder_seq_length < least:
            raise ConfigError(
                f"data.decoder_seq_length ({decoder_seq_length}) must be at least {least}, for the masked tokens of a "
                f"sample of {seq_length} tokens, a sentinel and the end token; use "
                f"{decoder_length(seq_length, masking.probability)}, which is always enough"
            )
        geometric = masking.use_geometric_distribution
        word_masking = WordMasking(
            masking.probability,
            masking.max_ngram or _MAX_NGRAM,
            True if geometric is None else geometric,
            masking.whole_words,
        )
        self._limits = SpanLimits(len(self._special.sentinels), decoder_seq_length - 1)  # without the end token
        self._warn_of_few_sentinels(tokenizer, word_masking)
        super().__init__(
            dataset,
            tokenizer,
            room=seq_length - 1,
            min_sentences=1,
            masking=masking,
            word_masking=word_masking,
            seed=seed,
            vocab_size=vocab_size,
        )

    def _warn_of_few_sentinels(self, tokenizer: Tokenizer, word_masking: WordMasking) -> None:
        lengths = ngram_distribution(word_masking.max_ngram, word_masking.geometric)
        words = float(lengths @ np.arange(1, len(lengths) + 1))  # mean words per run; each is at least one token
        num_spans = math.ceil((self.seq_length - 1) * word_masking.probability / words)
        if self._limits.spans < num_spans and os.environ.get("RANK", "0") == "0":
            log.warning(
                "%s has %d sentinels, but a sample of %d tokens may have about %d masked spans; the excess spans are "
                "not masked; use a tokenizer with more sentinels, or longer spans (data.masking.max_ngram)",
                tokenizer.name,
                self._limits.spans,
                self.seq_length,
                num_spans,
            )

    def _sample(self, sentences: Sequence[Tokens], target: int, draws: Draws) -> T5Sample:
        text = np.concatenate(sentences)
        is_truncated = len(text) > target
        text = text[:target]
        can_mask = np.ones(len(text), np.bool_)
        spans = self.word_masking.spans(self._word_starts(text), can_mask, target, draws, self._limits)
        special = self._special
        encoder: list[Tokens] = []
        learned: list[Tokens] = []
        start = 0
        for sentinel, (first, end) in zip(special.sentinels, spans, strict=False):  # spans <= sentinels
            encoder += [text[start:first], sentinel[None]]
            learned += [sentinel[None], text[first:end]]
            start = end
        tokens = np.concatenate([*encoder, text[start:], [special.end]])
        labels = np.concatenate([*learned, [special.end]])
        missing, decoder_missing = self.seq_length - len(tokens), self.decoder_seq_length - len(labels)
        return T5Sample(
            np.pad(tokens, (0, missing), constant_values=special.padding),
            np.pad(
                np.concatenate([[special.padding], labels[:-1]]), (0, decoder_missing), constant_values=special.padding
            ),
            np.pad(labels, (0, decoder_missing), constant_values=special.padding),
            np.arange(self.decoder_seq_length) < len(labels),
            len(tokens),
            len(labels),
            is_truncated,
        )
