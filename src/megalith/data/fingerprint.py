"""Fingerprint of a dataset's content, stored in a checkpoint to recognize the data that it was trained on.

    first 128 bits of sha256(tokens | number of tokens | document starts | number of those), and the counts

Values are hashed, not files: another path, dtype on disk or sidecar is still the same data. Up to 2^20 tokens, or
document starts, are all hashed; of more, 16 blocks of 4,096: the first, the last, and 14 evenly spaced ones. A terabyte
therefore costs a few dozen reads, milliseconds on a local disk. The fingerprint detects different text, another
tokenizer, and documents that were added, removed or reordered. It does not detect tokens of a large dataset that were
changed in place, between the blocks and with unchanged lengths. It guards against accidents, not against forgery.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed_dataset import Tokens

__all__ = ["fingerprint"]

_ALL = 1 << 20  # up to this many values are all hashed
_BLOCKS, _BLOCK = 16, 1 << 12


def fingerprint(tokens: Tokens, document_starts: NDArray[np.int64]) -> str:
    """Fingerprint of data whose document d is ``tokens[document_starts[d]:document_starts[d + 1]]``.

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
    """Yields the parts of ``values`` to hash."""
    if len(values) <= _ALL:
        yield values[0 : len(values)]
        return
    for number in range(_BLOCKS):
        start = number * (len(values) - _BLOCK) // (_BLOCKS - 1)
        yield values[start : start + _BLOCK]
