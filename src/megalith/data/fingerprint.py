"""A short name for the content of a dataset: what a checkpoint keeps to recognise the data that it was trained on.

    sha256(tokens | number of tokens | where documents begin | how many of those), its first 128 bits, and the counts

Values are hashed, not files: another path, another type on disk or another sidecar is still the same data. Up to 2^20
tokens, and as many documents, all of them are hashed; of more, 16 blocks of 4,096: the first, the last, and 14 at even
distances. So a terabyte costs a few dozen reads, milliseconds on a local disk. Other text, another tokenizer, documents
that were added, taken away or put in another order are noticed. Tokens of a large dataset that are changed in place,
between the blocks and with every length kept, are not. The hash tells accidents apart, it does not stop a forger.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed_dataset import Tokens

__all__ = ["fingerprint"]

_ALL = 1 << 20  # values that are read whole
_BLOCKS, _BLOCK = 16, 1 << 12


def fingerprint(tokens: Tokens, document_starts: NDArray[np.int64]) -> str:
    """The name of data whose document d is ``tokens[document_starts[d]:document_starts[d + 1]]``.

    Raises:
        DataError: the tokens cannot be read.
    """
    digest = hashlib.sha256()
    for values in (tokens, document_starts):
        for part in _read(values):
            digest.update(part.astype("<i8").tobytes())
        digest.update(len(values).to_bytes(8, "little"))
    return f"{digest.hexdigest()[:32]} ({len(tokens):,} tokens in {len(document_starts) - 1:,} documents)"


def _read(values: Tokens) -> Iterator[NDArray[np.int64]]:
    """What is hashed of ``values``, in parts."""
    if len(values) <= _ALL:
        yield values[0 : len(values)]
        return
    for number in range(_BLOCKS):
        start = number * (len(values) - _BLOCK) // (_BLOCKS - 1)
        yield values[start : start + _BLOCK]
