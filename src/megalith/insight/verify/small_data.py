"""The data of a small recipe: random tokens, in the format that its task reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models

from megalith.data.index_file import companion
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.labelled import CLASSES_SUFFIX
from megalith.data.special_tokens import SPECIAL_TOKENS
from megalith.data.tokenizer import Tokenizer
from megalith.insight.verify.shrink import EOD, SEQ_LENGTH, Tree
from megalith.storage import write_json_atomic

__all__ = ["write_data"]

_NUM_DOCUMENTS = 64
_MOST_SENTENCES, _LONGEST_SENTENCE = 8, 5  # per document; in tokens
_AROUND_A_TEXT = 2  # special tokens around a text
_LONGEST_QUERY, _LONGEST_PASSAGE = 2, 6  # tokens, with the special ones of both at most 12 of a row's 16
_T5_TOKENS = ("<pad>", *(f"<extra_id_{number}>" for number in range(4)))
_TOKENIZER = "tokenizer.json"


def write_data(prefix: Path, small: Tree) -> None:
    """Writes the dataset ``prefix`` that the task of ``small`` reads."""
    model, random = small["model"], np.random.default_rng(0)
    bert, special = model.get("bert"), _T5_TOKENS if model.get("t5") else SPECIAL_TOKENS["bert"]
    vocab_size, least = model["vocab_size"], 1 + len(special)  # text has no special tokens
    if bert is None and not model.get("t5"):
        lengths = random.integers(1, SEQ_LENGTH, _NUM_DOCUMENTS)  # short, so that a row has several documents
        _write(prefix, vocab_size, [[np.append(random.integers(1, vocab_size, T), EOD)] for T in lengths])
        return
    head = "pretraining" if bert is None else bert.get("head", "pretraining")
    if head == "embedding":
        _write(
            prefix, vocab_size, [_pair(random, least, vocab_size) for _ in range(_NUM_DOCUMENTS)], special, pairs=True
        )
        return
    is_pretrained = head == "pretraining"
    most, longest = (_MOST_SENTENCES, _LONGEST_SENTENCE) if is_pretrained else (1, SEQ_LENGTH - _AROUND_A_TEXT)
    numbers = random.integers(min(2, most), most + 1, _NUM_DOCUMENTS)
    documents = [
        [random.integers(least, vocab_size, T) for T in random.integers(1, longest + 1, number)] for number in numbers
    ]
    _write(prefix, vocab_size, documents, special)
    if not is_pretrained:
        num_classes = bert["num_classes"]
        labels = [number % num_classes for number in range(_NUM_DOCUMENTS)]
        classes = {"classes": [str(number) for number in range(num_classes)], "labels": labels}
        write_json_atomic(companion(prefix, CLASSES_SUFFIX), classes)


def _pair(random: np.random.Generator, least: int, vocab_size: int) -> list[NDArray[np.int64]]:
    """A query and its passage."""
    lengths = (int(random.integers(1, longest + 1)) for longest in (_LONGEST_QUERY, _LONGEST_PASSAGE))
    return [random.integers(least, vocab_size, T) for T in lengths]


def _write(
    prefix: Path,
    vocab_size: int,
    documents: Sequence[Sequence[NDArray[np.int64]]],
    special: Sequence[str] = (),
    *,
    pairs: bool = False,
) -> None:
    """Writes ``documents`` of sentences, or of ``pairs``; with ``special`` tokens also a tokenizer that has them."""
    beside: dict[str, Any] = {}
    if special:
        tokenizer = _tokenizer(vocab_size, special)
        tokenizer.save(prefix.parent / _TOKENIZER)
        beside = {"tokenizer": _TOKENIZER, "tokenizer_sha256": tokenizer.sha256}
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for sentences in documents:
            builder.add_document(np.concatenate(sentences), list(map(len, sentences)))
        builder.finalize(vocab_size=vocab_size, eod=EOD, pairs=pairs, **beside)


def _tokenizer(vocab_size: int, special: Sequence[str]) -> Tokenizer:
    """A tokenizer of ``vocab_size`` words: the eod token, then the ``special`` ones, then text."""
    names = ["[EOS]", *special]
    words = {name: id for id, name in enumerate([*names, *(f"w{id}" for id in range(len(names), vocab_size))])}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.add_special_tokens(names)
    return Tokenizer(made.to_str().encode())
