"""Sentences, a tokenizer with BERT's and T5's special tokens, and settings of an encoder for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalith.data.prepare import prepare
from tests.tiny_run import GPT2, settings

__all__ = ["BERT", "SEQ", "masked_settings", "write_sentences"]

SEQ = 32
_VOCAB = 397  # a prime, so that no tp divides it
_WORDS = (
    "one",
    "two",
    "red",
    "green",
    "runs",
    "sees",
    "finds",
    "a",
    "the",
    "and",
    "of",
    "in",
    "house",
    "tree",
    "river",
)
BERT: dict[str, Any] = {name: value for name, value in GPT2.items() if name != "vocab_size"} | {
    "activation": "gelu",
    "residual": {"norm_placement": "post"},
    "bert": {"num_token_types": 2},
}


def write_sentences(
    folder: Path, num_documents: int = 30, seed: int = 0, special_tokens: Sequence[str] = ("bert", "t5")
) -> str:
    """Writes a dataset of documents of 2 to 12 sentences; returns its prefix."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_documents):
        lines = (" ".join(random.choice(_WORDS, random.integers(2, 9))) for _ in range(random.integers(2, 13)))
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")
    prepare([folder], folder / "text", vocab_size=_VOCAB, split_sentences=True, special_tokens=special_tokens)
    return str(folder / "text")


def masked_settings(folder: Path, **groups: Any) -> dict[str, Any]:
    """A settings tree for a BERT trained on sentences in ``folder``; ``groups`` as in ``settings``."""
    prefix = folder / "text"
    data = {"train": str(prefix) if prefix.with_suffix(".idx").exists() else write_sentences(folder), "seq_length": SEQ}
    tree = settings(folder, **{"model": {}, **groups})
    tree["model"] = {**BERT, "vocab_size": _VOCAB, **groups.get("model", {})}
    tree["data"] = {**data, **groups.get("data", {})}
    return tree
