"""Reads the forms in which records hold a query, passages that answer it, and passages that do not.

anchor or query, positive       texts, with negative, negative_1, ..., or a list under negatives: sentence-transformers
query, pos                      a text and lists of texts, with neg: FlagEmbedding, on which BGE is trained
query, positive_passages        passages have a title and a text, with negative_passages: Tevatron
question, positive_ctxs         passages too, with hard_negative_ctxs and negative_ctxs: DPR (arXiv:2004.04906)

Other keys, such as ids and scores, are not read. A passage with a title is the title, a space, and the text. As in DPR,
negative_ctxs are only used where a record has no hard negatives. A value of null is the same as none.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.data.prepare.documents import place_of, read_records
from megalith.data.prepare.sources import Source
from megalith.errors import DataError

__all__ = ["PAIR_FIELDS", "PairRecord", "read_pair_records", "read_pairs"]

# the fields of the query, and that of positives beside it
_FORMS = (
    (("question",), "positive_ctxs"),
    (("query",), "positive_passages"),
    (("query",), "pos"),
    (("anchor", "query"), "positive"),
)
_NEGATIVES = {
    "positive_ctxs": ("hard_negative_ctxs", "negative_ctxs"),
    "positive_passages": ("negative_passages",),
    "pos": ("neg",),
    "positive": ("negatives",),
}
_MOST_COLUMNS = 1000
_NUMBERED = re.compile(r"negative(?:_(\d{1,9}))?")
PAIR_FIELDS = (
    *dict.fromkeys(key for queries, positive in _FORMS for key in (*queries, positive, *_NEGATIVES[positive])),
    "negative",
    *(f"negative_{number}" for number in range(_MOST_COLUMNS)),
)


@dataclass(frozen=True)
class PairRecord:
    """A query, a passage that answers it, and passages that do not, hard ones; none of the texts is empty."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()


def read_pair_records(source: Source) -> Iterator[tuple[int, PairRecord]]:
    """Yields the pairs of ``source`` in order, each with the position of its record.

    Raises DataError with file and line (or row) as ``read_records`` or ``read_pairs``.
    """
    for position, record in read_records(source, PAIR_FIELDS):
        try:
            pairs = read_pairs(record)
        except DataError as error:
            raise DataError(f"{place_of(source, position)} {error}") from error
        yield from ((position, pair) for pair in pairs)


def read_pairs(record: Mapping[str, Any]) -> list[PairRecord]:
    """Returns one pair for each positive of ``record``, all with the same query and negatives.

    Raises DataError if the record has none of the forms above, a value of another type, or an empty text.
    """
    query_key, positive_key = _form(record)
    query = _text(record[query_key], query_key)
    if positive_key == "positive":
        positives = [_text(record["positive"], "positive")]
    else:
        positives = _passages(record[positive_key], positive_key)
    if not positives:
        raise DataError(f"must have at least one passage under {positive_key!r}; it has none; add one, or remove it")
    negatives = tuple(_negatives(record, positive_key))
    return [PairRecord(query, positive, negatives) for positive in positives]


def _form(record: Mapping[str, Any]) -> tuple[str, str]:
    """The keys of the query and of the positives."""
    for queries, positive in _FORMS:
        for query in queries:
            if record.get(query) is not None and record.get(positive) is not None:
                return query, positive
    wanted = "; ".join(f"{' or '.join(queries)}, {positive}" for queries, positive in reversed(_FORMS))
    names = ", ".join(map(repr, record)) or "no keys"
    raise DataError(
        f"must have a query and passages that answer it, under one of these pairs of keys: {wanted}; it has "
        f"{names:.200}; rename its keys"
    )


def _negatives(record: Mapping[str, Any], positive_key: str) -> list[str]:
    """The negatives beside the positives under ``positive_key``, in the order of the record or of their numbers."""
    if positive_key == "positive":
        matches = [match for key in record if (match := _NUMBERED.fullmatch(key))]
        numbered = [(-1 if match[1] is None else int(match[1]), match[0]) for match in matches]
        own = [_text(record[key], key) for _, key in sorted(numbered) if record[key] is not None]
        return own + _listed(record, "negatives")
    lists = (_listed(record, key) for key in _NEGATIVES[positive_key])
    return next((found for found in lists if found), [])


def _listed(record: Mapping[str, Any], key: str) -> list[str]:
    return [] if record.get(key) is None else _passages(record[key], key)


def _passages(given: Any, key: str) -> list[str]:
    """The texts of a list of texts, or of passages with a title and a text."""
    if not isinstance(given, list):
        raise DataError(f"must have a list under {key!r}; got {_shown(given)}; enclose it in brackets")
    texts = []
    for number, passage in enumerate(given):
        name = f"{key}[{number}]"
        if key in ("pos", "neg", "negatives"):
            texts.append(_text(passage, name))
        elif isinstance(passage, dict):
            title = passage.get("title")
            text = _string("" if passage.get("text") is None else passage["text"], f"{name}.text")
            title = _string("" if title is None else title, f"{name}.title")
            texts.append(_text(f"{title} {text}" if title.strip() else text, f"{name}.text"))
        else:
            raise DataError(
                f"must have an object with a title and a text as {name}; got {_shown(passage)}; write plain texts "
                "under query, pos and neg"
            )
    return texts


def _text(given: Any, name: str) -> str:
    text = _string(given, name)
    if not text.strip():
        raise DataError(f"must have text as {name}; it is empty; add the text, or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"must have text as {name}; its character {error.start} is an unpaired surrogate; remove it"
        ) from error
    return text


def _string(given: Any, name: str) -> str:
    if not isinstance(given, str):
        raise DataError(f"must have text as {name}; got {_shown(given)}; write a string there")
    return given


def _shown(given: Any) -> str:
    return f"{type(given).__name__} {given!r:.80}"
