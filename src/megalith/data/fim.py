"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): documents cut in three, with the middle at the end.

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

What is cut is the text that a document has in a sample, at two random characters; its pieces are tokenized anew, as in
StarCoder's and Megatron's code. A sample that becomes too long loses its end; one that becomes too short is filled up.
Text that begins or ends inside a character stays as it is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.config.masking_config import FIMConfig
from megalith.data.special_tokens import named_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.numerics.draws import Draws

__all__ = ["FillInTheMiddle"]

Tokens = NDArray[np.int64]

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class FillInTheMiddle:
    """See the module; ids of the tokens that mark what follows, and of padding."""

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    padding: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: FIMConfig) -> "FillInTheMiddle":
        """Raises DataError if the tokenizer has not the tokens that ``config`` names."""
        names = (config.prefix_token, config.middle_token, config.suffix_token, config.pad_token)
        return cls(tokenizer, config.rate, config.spm_rate, *named_tokens(tokenizer, names, "data.fim", "fim"))

    def __call__(self, tokens: Tokens, documents: Tokens, draws: Draws) -> tuple[Tokens, Tokens]:
        """``tokens`` [T] of ``documents`` [T] with some of these reordered, again [T] both.

        An eod token stays at the end of its document. Padding is a document of its own.
        """
        begins = np.diff(documents, prepend=documents[0] - 1) != 0
        begins[1:] |= tokens[:-1] == self.tokenizer.eod
        bounds = np.flatnonzero(begins)
        pieces: list[Tokens] = []
        numbers: list[int] = []
        for first, end in zip(bounds.tolist(), [*bounds[1:].tolist(), len(tokens)], strict=True):
            piece = tokens[first:end]
            is_ended = int(piece[-1]) == self.tokenizer.eod
            text, ending = (piece[:-1], piece[-1:]) if is_ended else (piece, piece[:0])
            if len(text) and draws.chance(self.rate):
                text = self._reordered(text, draws)
            pieces.append(np.concatenate([text, ending]))
            numbers.append(int(documents[first]))
        T = len(tokens)
        made = np.concatenate(pieces)[:T]
        made_documents = np.repeat(numbers, [len(piece) for piece in pieces])[:T]
        missing = T - len(made)
        return (
            np.pad(made, (0, missing), constant_values=self.padding),
            np.pad(made_documents, (0, missing), constant_values=numbers[-1] + 1),
        )

    def _reordered(self, tokens: Tokens, draws: Draws) -> Tokens:
        text = self.tokenizer.decode(tokens.tolist())
        first, second = sorted((draws.below(len(text) + 1), draws.below(len(text) + 1)))
        is_spm = draws.chance(self.spm_rate)
        if _REPLACEMENT in text:
            return tokens
        prefix, middle, suffix = self.tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
        if is_spm:
            parts = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            parts = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(parts, np.int64)
