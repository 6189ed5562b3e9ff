"""Pairs of random words, and settings of an embedding model for them."""

from pathlib import Path
from typing import Any

import numpy as np

from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.sidecar import Sidecar
from megalith.storage import open_store
from tests.tiny_masked import masked_settings

__all__ = ["embedding_settings", "write_pairs"]

NUM_NEGATIVES = 2


def write_pairs(folder: Path, num_pairs: int = 24, seed: int = 0) -> str:
    """Writes a dataset of queries of 1 to 3 tokens, and passages of 2 to 6 of them; returns its prefix.

    Two of the pairs have the same passage, and two the same query.
    """
    random, prefix = np.random.default_rng(seed), folder / f"pairs-{num_pairs}"
    if prefix.with_suffix(".idx").exists():
        return str(prefix)
    store, name = open_store(folder / "text").split()
    origin = Sidecar.read(store, f"{name}.json")
    assert origin is not None
    pairs = [
        [
            random.integers(20, 120, random.integers(1, 4)),
            *(random.integers(20, 120, n) for n in random.integers(2, 7, 3)),
        ]
        for _ in range(num_pairs)
    ]
    pairs[3][1], pairs[5][0] = pairs[2][1], pairs[4][0]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for texts in pairs:
            builder.add_document(np.concatenate(texts), [len(text) for text in texts])
        fields = {name: getattr(origin, name) for name in ("tokenizer", "tokenizer_sha256", "vocab_size", "eod")}
        builder.finalize(pairs=True, **fields)
    return str(prefix)


def embedding_settings(folder: Path, bert: dict[str, Any] | None = None, **groups: Any) -> dict[str, Any]:
    """A settings tree for an embedding model over pairs in ``folder``; ``groups`` as in ``masked_settings``."""
    tree = masked_settings(folder, **groups)
    tree["data"] = {
        **tree["data"],
        "train": write_pairs(folder),
        "num_negatives": NUM_NEGATIVES,
        **groups.get("data", {}),
    }
    tree["model"] = {**tree["model"], "bert": {"num_token_types": 2, "head": "embedding", **(bert or {})}}
    return tree
