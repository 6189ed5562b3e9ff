"""A short name for the content of a dataset: what a checkpoint keeps to recognise the data that it was trained on.

    TOKENS tokens in DOCUMENTS documents, sha256 of (tokens read | where documents begin | their number | of tokens)

Values are hashed, not files: another path, another type on disk or another sidecar is still the same data. Up to 2^20
values of either kind are all read. Of more, 16 blocks of 4,096, the first, the last and 14 at even distances, so that a
terabyte costs a few dozen reads, milliseconds on a local disk. Other text, another tokenizer, more or fewer documents
and another order of them change what is read. A change that keeps every length and lies between the blocks does not:
nobody makes one by preparing data, and whoever looks for one finds it.
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
    return f"{len(tokens):,} tokens in {len(document_starts) - 1:,} documents, sha256 {digest.hexdigest()}"


def _read(values: Tokens) -> Iterator[NDArray[np.int64]]:
    """What is hashed of ``values``, in parts."""
    if len(values) <= _ALL:
        yield values[0 : len(values)]
        return
    for number in range(_BLOCKS):
        start = number * (len(values) - _BLOCK) // (_BLOCKS - 1)
        yield values[start : start + _BLOCK]
