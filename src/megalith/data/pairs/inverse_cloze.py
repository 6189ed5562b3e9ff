"""Pairs from plain text, to pretrain a text-embedding model without labels: the inverse cloze task.

Lee et al. 2019 (arXiv:1906.00300): a random sentence of a block of consecutive sentences is the query, and the block is
its passage. In 90 % of the samples the sentence is removed from the block, so that words alone do not find it.

    [CLS] sentence [SEP] [CLS] block [SEP]

Blocks are the packs of ``sentence_dataset.py`` with two or more sentences. A document of a single sentence has no
context to find, and is left out. Every text must leave room for the other, so sentences of more than half of a row are
cut. What does not fit in a row is removed from the end of the block; if that is where its query is, from its beginning.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.pairs.dataset import PairSample
from megalith.data.sentence_dataset import Packing, SentenceDataset
from megalith.data.special_tokens import bert_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.numerics.draws import Draws
from megalith.wording import counted

__all__ = ["InverseClozeDataset"]

Tokens = NDArray[np.int64]

_NUM_SPECIAL = 4  # around both texts


class InverseClozeDataset(SentenceDataset[PairSample]):
    """Sentences and their blocks, without negatives; see ``SentenceDataset`` for other arguments and errors.

    ``HeldOutSamples`` of it has one sample of each block.

    Args:
        dataset: the dataset or its prefix, written with ``--split-sentences``.
        seq_length: S, maximum number of tokens of both texts, special tokens included.
        keep_probability: share of the samples whose block has the query too.

    Raises:
        ConfigError: also if ``keep_probability`` is not from 0 to 1.
        DataError: also if the tokenizer lacks one of BERT's special tokens.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        tokenizer: Tokenizer,
        seq_length: int,
        seed: int,
        *,
        keep_probability: float = 0.1,
        vocab_size: int | None = None,
    ) -> None:
        if not 0 <= keep_probability <= 1:
            raise ConfigError(
                f"the share of blocks with their query must be from 0 to 1; got {keep_probability}; use 0.1"
            )
        self.seq_length, self.keep_probability = seq_length, keep_probability
        self._special = bert_tokens(tokenizer)
        room = seq_length - _NUM_SPECIAL
        packing = Packing(room, room // 2, min_sentences=2, long_sentences="cut", short_sequence_probability=0.0)
        super().__init__(dataset, tokenizer, packing, seed, vocab_size=vocab_size)
        # a document of two sentences or more is used as a whole
        if num_alone := len(self._starts) - int((self._packed.ends - self._packed.firsts).sum()):
            of_all = counted(self._data.num_documents, "document")
            self._log("left out %s of %s, those of a single sentence", f"{num_alone:,}", of_all)

    def _sample(self, sentences: Sequence[Tokens], target: int, draws: Draws) -> PairSample:
        chosen, is_kept = draws.below(len(sentences)), draws.chance(self.keep_probability)
        query = sentences[chosen]
        block = np.concatenate([each for place, each in enumerate(sentences) if is_kept or place != chosen])
        query_end = sum(len(each) for each in sentences[: chosen + 1]) if is_kept else 0
        room = self.seq_length - _NUM_SPECIAL - len(query)
        first = max(0, query_end - room)
        return PairSample((self._enclosed(query), self._enclosed(block[first : first + room])))

    def _enclosed(self, text: Tokens) -> Tokens:
        return np.concatenate(([self._special.classifier], text, [self._special.separator]))
