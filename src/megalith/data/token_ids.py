"""Checks that every token id of a dataset has a row in the model's embedding, before a lookup raises IndexError.

Datasets prepared by Megalith record their smallest and largest id in the sidecar. In other datasets ``check_dataset``
reads evenly spread chunks; ids that this misses are found when a sample is read (``check_sample``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed_dataset import IndexedDataset
from megalith.errors import DataError

__all__ = ["TokenCheck", "check_dataset", "check_sample", "spread_chunks"]

_CHUNK = 1 << 20  # tokens read at a time
_NUM_CHUNKS = 64  # 67 million tokens: 0.1 s from memory, a second from a disk that reads 200 MB/s


@dataclass(frozen=True)
class TokenCheck:
    """The result of ``check_dataset``.

    Attributes:
        problem: describes the dataset, an invalid token id and its position; None if every id that was seen is valid.
        scanned: how much was read, and how long that took; None if nothing had to be read.
    """

    problem: str | None = None
    scanned: str | None = None


def check_dataset(dataset: IndexedDataset, vocab_size: int) -> TokenCheck:
    """Compares the token ids of ``dataset`` with ``vocab_size``.

    Reads nothing if the sidecar or the dtype on disk shows that all ids are valid; otherwise at most 67 million tokens,
    in 64 evenly spread chunks, up to the first invalid id. Raises DataError if the tokens cannot be read.
    """
    if dataset.dtype.kind == "f":
        return TokenCheck(f"{dataset.prefix} has dtype {dataset.dtype.name}; token ids must be integers, such as int32")
    recorded = None if dataset.sidecar is None else dataset.sidecar.token_id_range
    kept_by_type = np.iinfo(dataset.dtype)
    if _fits(recorded, vocab_size) or _fits((kept_by_type.min, kept_by_type.max), vocab_size):
        return TokenCheck()
    started, smallest, largest, num_scanned = perf_counter(), 0, 0, 0
    for start, chunk in spread_chunks(dataset):
        num_scanned += len(chunk)
        if (wrong := _first_outside(chunk, vocab_size)) is not None:
            return TokenCheck(_at(dataset, start + wrong, int(chunk[wrong]), vocab_size))
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
    if recorded is not None:
        wrong_id = recorded[1] if recorded[1] >= vocab_size else recorded[0]
        return TokenCheck(f"{dataset.prefix} contains token id {wrong_id}; {_wanted(wrong_id, vocab_size)}")
    part = "all" if num_scanned == dataset.num_tokens else f"{num_scanned:,} (evenly spread) of"
    return TokenCheck(
        scanned=f"{dataset.prefix} does not record its token ids: scanned {part} {dataset.num_tokens:,} tokens in "
        f"{perf_counter() - started:.1f} s; the largest id is {largest}, and the vocabulary size is {vocab_size}"
    )


def check_sample(
    dataset: IndexedDataset, sample: int, position: int, tokens: NDArray[Any], vocab_size: int | None
) -> None:
    """Raises DataError unless all ``tokens`` [T], which begin at ``position`` in the file, are below ``vocab_size``.

    ``sample`` is the index of the sample that reads them. Without ``vocab_size`` nothing is checked.
    """
    if vocab_size is not None and (wrong := _first_outside(tokens, vocab_size)) is not None:
        found = _at(dataset, position + wrong, int(tokens[wrong]), vocab_size)
        raise DataError(f"sample {sample} cannot be used: {found}")


def spread_chunks(dataset: IndexedDataset) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields chunks of tokens and the position of each: all in order, or 64 that are evenly spread over the file."""
    num_chunks = -(-dataset.num_tokens // _CHUNK)
    num_read = min(num_chunks, _NUM_CHUNKS)
    for number in range(num_read):
        # always includes the first and the last chunk
        start = _CHUNK * (number * (num_chunks - 1) // max(1, num_read - 1))
        yield start, dataset.tokens[start : start + _CHUNK]


def _fits(ids: tuple[int, int] | None, vocab_size: int) -> bool:
    return ids is not None and ids[0] >= 0 and ids[1] < vocab_size


def _first_outside(tokens: NDArray[Any], vocab_size: int) -> int | None:
    """Index in ``tokens`` of the first one outside the vocabulary; None if there is none."""
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return None
    return int(np.argmax((tokens < 0) | (tokens >= vocab_size)))


def _at(dataset: IndexedDataset, position: int, token_id: int, vocab_size: int) -> str:
    starts = dataset.document_starts()
    document = int(np.searchsorted(starts, position, side="right")) - 1
    return (
        f"token {position - int(starts[document])} of document {document} in {dataset.prefix} has id {token_id}; "
        f"{_wanted(token_id, vocab_size)}"
    )


def _wanted(token_id: int, vocab_size: int) -> str:
    if token_id < 0:
        return "token ids must be 0 or more; prepare the data again"
    return (
        f"token ids must be below {vocab_size}, the model's vocabulary size; prepare the data with the model's "
        f"tokenizer, or train a new model with model.vocab_size={token_id + 1} or more"
    )
