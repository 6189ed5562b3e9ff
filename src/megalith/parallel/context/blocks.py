"""Which parts of the queries meet which parts of the keys: attention between two ranges of positions, as blocks.

A block is a range of queries and a range of keys, and which of them see each other follows from a window alone; the
causal rule is a window without keys after the query. So any part of attention over a split sequence is a few calls of
``fused_attention``, merged by their log-sum-exp.

Packed documents fit that: between two ranges that do not overlap, a row has one document at most that reaches from one
into the other, and what it has in each is a range again. A range of queries against itself keeps its documents, cut
off at its ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from megalith.fusions.attention.attention import key_range
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["Block", "Sight", "blocks_between"]


@dataclass(frozen=True)
class Sight:
    """How many keys a query sees ``before`` and ``after`` its own, and the documents that bound it."""

    before: int
    after: int
    documents: PackedSeqParams | None = None

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int] | None, documents: PackedSeqParams | None) -> "Sight":
        """From what ``fused_attention`` takes; documents of whole rows. Raises ConfigError as that does."""
        return cls(*key_range(causal, window), documents)


@dataclass(frozen=True)
class Block:
    """Some rows of the batch, and ranges of positions: all of ``queries`` see something of ``keys``.

    ``documents`` are those of a range against itself.
    """

    rows: slice
    queries: range
    keys: range
    sight: Sight
    documents: PackedSeqParams | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The window as ``fused_attention`` takes it, where the last query is beside the last key."""
        shift = self.keys.stop - self.queries.stop  # what is beside a query, minus its own position
        before, after = self.sight.before + shift, self.sight.after - shift
        return (
            -1 if before >= len(self.keys) - 1 else before,
            -1 if after >= len(self.queries) - 1 else after,
        )


def blocks_between(queries: range, keys: range, sight: Sight) -> Iterator[Block]:
    """The blocks that hold every pair of ``queries`` and ``keys`` that see each other, each pair once.

    Of packed documents the ranges are apart or ``keys`` holds all of ``queries``.
    """
    documents = sight.documents
    if documents is None:
        yield from _seen(slice(None), queries, keys, sight)
    elif queries == keys:
        yield Block(slice(None), queries, keys, sight, documents.within(queries.start, queries.stop))
    elif keys.start <= queries.start and queries.stop <= keys.stop:
        for part in (range(keys.start, queries.start), queries, range(queries.stop, keys.stop)):
            yield from blocks_between(queries, part, sight)
    elif keys:
        reaching = [_shared(row, queries, keys) for row in documents.rows()]
        for shared, rows in groupby(range(len(reaching)), key=reaching.__getitem__):
            first, *others = rows
            if shared is not None:
                yield from _seen(slice(first, first + 1 + len(others)), *shared, sight)


def _seen(rows: slice, queries: range, keys: range, sight: Sight) -> Iterator[Block]:
    """The ranges without keys that no query sees, and queries that see no key; nothing if nothing is left."""
    low, high = max(keys.start, queries.start - sight.before), min(keys.stop, queries.stop + sight.after)
    if low >= high:
        return
    first, last = max(queries.start, low - sight.after), min(queries.stop, high + sight.before)
    yield Block(rows, range(first, last), range(low, high), sight)


def _shared(row: list[tuple[int, int]], queries: range, keys: range) -> tuple[range, range] | None:
    """What the document of ``row`` that reaches from one range into the other has in each; None if there is none."""
    early, late = sorted((queries, keys), key=lambda span: span.start)
    for start, stop in row:
        if start < early.stop and late.start < stop:
            return _within(queries, start, stop), _within(keys, start, stop)
    return None


def _within(span: range, start: int, stop: int) -> range:
    return range(max(start, span.start), min(stop, span.stop))
