"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): documents split in three, with the middle moved last.

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle         (the paper's variant 2, appendix D)

The part of a document that is in a sample is split at two random characters ("context-level" in the paper). The three
parts are tokenized again, so that a model learns to continue from any character. This adds three tokens to each such
document, so the sample becomes longer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.config.fill_in_the_middle_config import FillInTheMiddleConfig
from megalith.data.special_tokens import fill_in_the_middle_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.numerics.draws import Draws

__all__ = ["FillInTheMiddle"]

Tokens = NDArray[np.int64]

_REPLACEMENT = "\ufffd"
_PARTS = ("one", " two", "three\n")


@dataclass(frozen=True)
class FillInTheMiddle:
    """Reorders documents; rates as in the settings, the ids of the tokens before each part, and all special tokens."""

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    special: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: FillInTheMiddleConfig) -> "FillInTheMiddle":
        """Builds the transform for ``config``.

        Raises:
            DataError: ``tokenizer`` lacks one of the three tokens, or does not reproduce a text encoded in parts.
        """
        given = config.prefix_token, config.middle_token, config.suffix_token
        tokens = fill_in_the_middle_tokens(tokenizer, given)
        again = tokenizer.decode([id for part in tokenizer.encode_batch(_PARTS) for id in part])
        if again != "".join(_PARTS):  # such as a tokenizer that prepends a space to every text
            raise DataError(
                f"data.fill_in_the_middle needs a tokenizer that reproduces a text encoded in parts; {tokenizer.name} "
                f"encodes the parts {', '.join(map(repr, _PARTS))} and decodes them to {again!r}; use a byte-level "
                "one, such as one trained by: megalith data prepare ... --vocab-size N --special-tokens fim"
            )
        special = tuple(sorted({*tokens, *tokenizer.special_ids}))
        return cls(tokenizer, config.rate, config.spm_rate, *tokens, special)

    def __call__(self, tokens: Tokens, documents: Tokens, draws: Draws) -> tuple[Tokens, Tokens]:
        """Returns ``tokens`` [T] with some of their ``documents`` [T] reordered, and the document of each; both [U].

        Tokens that begin or end a document keep their places. A document is not reordered if its text begins or ends
        inside a character, or if it contains a special token: encoded again, its spelling would be ordinary text.
        """
        begins = np.diff(documents, prepend=documents[0] - 1) != 0
        begins[1:] |= tokens[:-1] == self.tokenizer.eod
        pieces: list[Tokens] = []
        for piece in np.split(tokens, np.flatnonzero(begins)[1:]):
            num_beginning = len(self.tokenizer.begin)
            first = num_beginning if self.tokenizer.begins(piece[:num_beginning].tolist()) else 0
            end = max(first, len(piece) - int(piece[-1] == self.tokenizer.eod))
            beginning, text, ending = np.split(piece, [first, end])
            if len(text) and draws.chance(self.rate):
                text = self._reordered(text, draws)
            pieces.append(np.concatenate([beginning, text, ending]))
        return np.concatenate(pieces), np.repeat(documents[begins], [len(piece) for piece in pieces])

    def _reordered(self, tokens: Tokens, draws: Draws) -> Tokens:
        text = self.tokenizer.decode(tokens.tolist())
        if _REPLACEMENT in text or np.isin(tokens, self.special).any():
            return tokens
        first, second = sorted(draws.below(len(text) + 1) for _ in range(2))
        prefix, middle, suffix = self.tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
        if draws.chance(self.spm_rate):
            parts = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            parts = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(parts, np.int64)
