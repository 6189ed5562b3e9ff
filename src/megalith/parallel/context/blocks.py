"""Splits attention between two ranges of positions into blocks.

A block is a range of queries and a range of keys for which a window alone determines which queries see which keys; a
causal mask is a window without keys after the query. Any part of attention over a split sequence is therefore a few
calls of ``fused_attention``, merged by their log-sum-exp.

This also works for packed documents. Between two ranges that do not overlap, at most one document of a row extends from
one into the other, and its part in each is a range again. A range of queries over itself keeps its documents, truncated
at both ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from megalith.fusions.attention.attention import key_range
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["Block", "VisibleKeys", "blocks_between"]


@dataclass(frozen=True)
class VisibleKeys:
    """How many keys a query sees ``before`` and ``after`` its own position, and the documents that limit it."""

    before: int
    after: int
    documents: PackedSeqParams | None = None

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int] | None, documents: PackedSeqParams | None) -> "VisibleKeys":
        """Converts the arguments of ``fused_attention``, with documents of whole rows; raises ConfigError like it."""
        return cls(*key_range(causal, window), documents)


@dataclass(frozen=True)
class Block:
    """Some rows of the batch, and ranges of positions such that each of ``queries`` sees at least one of ``keys``.

    ``documents`` is set only for a range of queries over itself.
    """

    rows: slice
    queries: range
    keys: range
    visible: VisibleKeys
    documents: PackedSeqParams | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The window as ``fused_attention`` expects it, which aligns the last query with the last key."""
        shift = self.keys.stop - self.queries.stop  # position of the key aligned with a query, minus the query's own
        before, after = self.visible.before + shift, self.visible.after - shift
        return (
            -1 if before >= len(self.keys) - 1 else before,
            -1 if after >= len(self.queries) - 1 else after,
        )


def blocks_between(queries: range, keys: range, visible: VisibleKeys) -> Iterator[Block]:
    """Yields blocks that together contain every visible pair of ``queries`` and ``keys`` once.

    With packed documents the ranges must be disjoint, or ``keys`` must contain all of ``queries``.
    """
    documents = visible.documents
    if documents is None:
        yield from _seen(slice(None), queries, keys, visible)
    elif queries == keys:
        yield Block(slice(None), queries, keys, visible, documents.within(queries.start, queries.stop))
    elif keys.start <= queries.start and queries.stop <= keys.stop:
        for part in (range(keys.start, queries.start), queries, range(queries.stop, keys.stop)):
            yield from blocks_between(queries, part, visible)
    elif keys:
        reaching = [_shared(row, queries, keys) for row in documents.rows()]
        for shared, rows in groupby(range(len(reaching)), key=reaching.__getitem__):
            first, *others = rows
            if shared is not None:
                yield from _seen(slice(first, first + 1 + len(others)), *shared, visible)


def _seen(rows: slice, queries: range, keys: range, visible: VisibleKeys) -> Iterator[Block]:
    """Yields the block without keys that no query sees and queries that see no key; nothing if none are left."""
    low, high = max(keys.start, queries.start - visible.before), min(keys.stop, queries.stop + visible.after)
    if low >= high:
        return
    first, last = max(queries.start, low - visible.after), min(queries.stop, high + visible.before)
    yield Block(rows, range(first, last), range(low, high), visible)


def _shared(row: list[tuple[int, int]], queries: range, keys: range) -> tuple[range, range] | None:
    """Returns the parts in both ranges of the document of ``row`` that extends into both; None if there is none."""
    early, late = sorted((queries, keys), key=lambda span: span.start)
    for start, stop in row:
        if start < early.stop and late.start < stop:
            return _within(queries, start, stop), _within(keys, start, stop)
    return None


def _within(span: range, start: int, stop: int) -> range:
    return range(max(start, span.start), min(stop, span.stop))
