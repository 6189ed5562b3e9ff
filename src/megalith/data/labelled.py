"""Labelled texts for classification: converts two-column files to a dataset with a file of labels.

    PREFIX.bin, .idx, .json   the texts, one document each
    PREFIX-classes.json       {"classes": [name, ...], "labels": [class of document 0, class of document 1, ...]}

Input files are .csv or .tsv (without quoting, as in GLUE), in UTF-8, with a header that names the columns ``text`` and
``label`` in any order. The classes are the sorted labels of the training file.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.class_names import listed
from megalith.data.index_file import companion
from megalith.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megalith.data.special_tokens import bert_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, StorageError
from megalith.storage import open_store, write_json_atomic

__all__ = ["CLASSES_SUFFIX", "LabelledSummary", "LabelledTable", "Labels", "prepare_labelled", "read_labelled"]

_COLUMNS = {"text", "label"}
CLASSES_SUFFIX = "-classes.json"
_AT_ONCE = 1024  # texts that are encoded together
_MOST_TOLD = 10  # lines listed in an error message
_LONGEST_TEXT = 2**31 - 1  # characters; the default of the csv module is 131,072
_READERS: dict[str, dict[str, Any]] = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}


@dataclass(frozen=True)
class Labels:
    """The class names, and the class of each document, int64 [N]."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]

    @classmethod
    def read(cls, prefix: str | Path, num_documents: int) -> "Labels":
        """Reads the labels of the dataset ``prefix``. Raises DataError if there are none, or they do not match it."""
        folder, name = open_store(prefix).split()
        path = f"{folder / name}{CLASSES_SUFFIX}"
        way_out = "create the dataset with: megalith data label FILE.csv --out PREFIX --tokenizer PATH"
        try:
            found = json.loads(folder.read(name + CLASSES_SUFFIX))
            classes, labels = found["classes"], np.array(found["labels"])
            if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
                raise TypeError("classes must be a list of names")
            if len(set(classes)) < len(classes):
                raise ValueError("two classes have the same name")
            if labels.size and labels.dtype.kind not in "iu":
                raise TypeError("labels must be class indices")
        except StorageError as error:
            raise DataError(f"{prefix} needs the label of each text in {path}; {error}; {way_out}") from error
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise DataError(f"{path} must contain class names and a label for each text: {error}; {way_out}") from error
        if labels.shape != (num_documents,):
            raise DataError(
                f"{path} must have {num_documents} labels, one for each text; it has {labels.size}; {way_out}"
            )
        if ((labels < 0) | (labels >= len(classes))).any():
            wrong = labels[(labels < 0) | (labels >= len(classes))][0]
            raise DataError(f"labels of {path} must be 0 to {len(classes) - 1}; got {wrong}; {way_out}")
        return cls(tuple(classes), labels.astype(np.int64))


@dataclass(frozen=True)
class LabelledTable:
    """Texts and the class name of each; ``classes`` lists all names."""

    texts: list[str]
    labels: list[str]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class LabelledSummary:
    """What was written. ``num_cut``: number of truncated texts."""

    prefix: Path
    classes: tuple[str, ...]
    num_texts: int
    num_tokens: int
    num_cut: int


def prepare_labelled(
    file: str | Path,
    out: str | Path,
    tokenizer: str | Path,
    *,
    classes: Sequence[str] | None = None,
    max_tokens: int | None = None,
    eod: str | None = None,
) -> LabelledSummary:
    """Tokenizes the two columns of ``file`` into the dataset ``out``, which appears once it is complete.

    Args:
        tokenizer: the tokenizer.json of the model to train.
        classes: class names, which must include all labels, such as those of the training file; by default the labels
            of this file.
        max_tokens: maximum tokens per text; longer texts are truncated. By default none is.
        eod: as in ``Tokenizer``.

    Raises:
        ConfigError: ``max_tokens`` is below 1.
        DataError: the file does not have the format described above, has an empty text or label, or a label that is not
            in ``classes``; there are fewer than two classes; the tokenizer lacks one of BERT's special tokens;
            ``out`` exists already.
        StorageError: the disk is full or not writable.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens must be 1 or more; got {max_tokens}; leave it out to keep all tokens")
    out, loaded = Path(os.path.abspath(out)), Tokenizer.load(tokenizer, eod)
    bert_tokens(loaded)  # a classifier reads the text between two of them; refused here, before anything is written
    table = read_labelled(file, classes=classes)
    num_cut, texts = 0, table.texts
    with IndexedDatasetBuilder(out, best_dtype(loaded.vocab_size)) as builder:
        for first in range(0, len(texts), _AT_ONCE):
            for ids in loaded.encode_batch(texts[first : first + _AT_ONCE]):
                num_cut += max_tokens is not None and len(ids) > max_tokens
                builder.add_document(ids[:max_tokens])
        numbers = {name: number for number, name in enumerate(table.classes)}
        labels = [numbers[name] for name in table.labels]
        write_json_atomic(companion(out, CLASSES_SUFFIX), {"classes": list(table.classes), "labels": labels})
        builder.finalize(
            tokenizer=os.path.relpath(os.path.abspath(tokenizer), out.parent),
            tokenizer_sha256=loaded.sha256,
            vocab_size=loaded.vocab_size,
            eod=loaded.eod,
        )
    return LabelledSummary(out, table.classes, len(texts), builder.num_tokens, num_cut)


def read_labelled(file: str | Path, *, classes: Sequence[str] | None = None) -> LabelledTable:
    """Reads the two columns of ``file``, whose labels must be in ``classes``; by default the labels of the file.

    Raises DataError as ``prepare_labelled``.
    """
    texts, labels = _read(Path(file))
    known = tuple(sorted(set(labels))) if classes is None else tuple(classes)
    if unknown := sorted(set(labels) - set(known)):
        raise DataError(
            f"labels of {file} must be one of {listed(known)}; got {unknown[0]!r}; fix the file, or prepare all of it "
            "as training data"
        )
    if len(known) < 2:
        raise DataError(
            f"{file} must have texts of at least 2 classes; all are of {known[0]!r}; add texts of another class"
        )
    return LabelledTable(texts, labels, known)


def _read(path: Path) -> tuple[list[str], list[str]]:
    """The texts and labels of a file. Raises DataError that lists the first invalid lines."""
    if path.suffix.lower() not in _READERS:
        raise DataError(f"labelled texts must be in a .csv or .tsv file; got {path}; convert it to one")
    texts, labels, wrong = list[str](), list[str](), list[str]()
    longest = csv.field_size_limit(_LONGEST_TEXT)
    try:
        for line, text, label in _rows(path):
            if text.strip() and label.strip():
                texts.append(text)
                labels.append(label.strip())
            else:
                wrong.append(f"line {line} has no {'label' if text.strip() else 'text'}")
    except OSError as error:
        raise DataError(f"labelled texts cannot be read from {path}: {error.strerror}; check the path") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} must be a UTF-8 table with two columns; it cannot be parsed: {error}") from error
    finally:
        csv.field_size_limit(longest)
    if wrong:
        more = [f"and {len(wrong) - _MOST_TOLD:,} more"] if len(wrong) > _MOST_TOLD else []
        raise DataError("\n  ".join([f"every row of {path} must have a text and a label:", *wrong[:_MOST_TOLD], *more]))
    if not texts:
        raise DataError(f"{path} contains no texts; write one per row, with its label")
    return texts, labels


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True, **_READERS[path.suffix.lower()])
        header = [name.strip().lower() for name in next(reader, [])]
        if set(header) != _COLUMNS or len(header) != len(_COLUMNS):
            raise DataError(
                f"the first line of {path} must name its two columns, text and label; got {', '.join(header) or 'none'}"
            )
        place = header.index("text")
        for row in reader:
            if not row:
                continue
            if len(row) != len(_COLUMNS):
                raise DataError(
                    f"every row of {path} must have 2 columns; line {reader.line_num} has {len(row)}; quote texts "
                    "that contain commas (.csv), or replace tabs in texts (.tsv)"
                )
            yield reader.line_num, row[place], row[1 - place]
