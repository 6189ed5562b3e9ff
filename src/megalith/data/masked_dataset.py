"""Base of the BERT and T5 datasets: samples of whole sentences, some of whose words are masked.

The masks of sample i are drawn from (seed, i), so they differ between epochs.
"""

from pathlib import Path
from typing import Any, TypeVar

from megalith.config.masking_config import MaskingConfig
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.sentence_dataset import Packing, SentenceDataset
from megalith.data.tokenizer import Tokenizer
from megalith.data.word_masks import WordMasking

__all__ = ["MaskedDataset"]

Sample = TypeVar("Sample")


class MaskedDataset(SentenceDataset[Sample]):
    """Masked samples without end; see ``SentenceDataset`` for other arguments, attributes and errors.

    Args:
        room: maximum number of text tokens in a sample.
        min_sentences: minimum number of sentences in a sample.
        masking: the settings.
        word_masking: the word masking that they imply for this kind of model.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        tokenizer: Tokenizer,
        *,
        room: int,
        min_sentences: int,
        masking: MaskingConfig,
        word_masking: WordMasking,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        self._word_starts = tokenizer.word_starts()
        self.word_masking = word_masking
        packing = Packing(room, room, min_sentences, masking.long_sentences, masking.short_sequence_probability)
        super().__init__(dataset, tokenizer, packing, seed, vocab_size=vocab_size)

    def identity(self) -> dict[str, Any]:
        """The fingerprint of the text, the SHA-256 of the tokenizer file, and the packing and masking settings."""
        found = super().identity()
        return found | {"samples": f"{found['samples']}, {self.word_masking}"}
