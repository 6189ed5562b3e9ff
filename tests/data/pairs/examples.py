"""Pairs as records, a tokenizer with BERT's special tokens, and a dataset of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalith.data.pairs.prepare import prepare_pairs
from megalith.data.special_tokens import SPECIAL_TOKENS
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe

PAIRS = [
    ("who wrote it", "Anna wrote it", ["nobody knows", "it was long ago", "rain"]),
    ("how far is the sea", "two miles", ["the sea is blue", "far"]),
    ("why", "because of the tide, which turns twice a day", ["no", "yes", "maybe", "never", "often"]),
]


def write_tokenizer(path: Path) -> Tokenizer:
    tokenizer = train_byte_level_bpe(["who wrote it, how far is the sea and why\n"] * 3, 290, SPECIAL_TOKENS["bert"])
    tokenizer.save(path)
    return tokenizer


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_records(pairs: Sequence[tuple[str, str, Sequence[str]]] = PAIRS) -> list[dict[str, Any]]:
    return [{"query": query, "pos": [positive], "neg": list(negatives)} for query, positive, negatives in pairs]


def write_pairs(folder: Path, name: str = "x", pairs: Sequence[tuple[str, str, Sequence[str]]] = PAIRS) -> Path:
    """Writes ``folder / name`` with the tokenizer ``folder / "tokenizer.json"``, and returns the prefix."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder / "tokenizer.json")
    file = write_lines(folder / f"{name}.jsonl", as_records(pairs))
    prepare_pairs([file], folder / name, folder / "tokenizer.json")
    return folder / name
