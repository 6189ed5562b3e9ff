"""Runs small enough for tests: a dataset with a prime vocabulary, models of both shapes, and settings for them."""

from pathlib import Path
from typing import Any

import numpy as np

from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.tokenizer import Tokenizer

VOCAB = 61  # a prime, so that no tp divides it
EOD = 0
SEQ = 16

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 4,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "tie_word_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}


def write_dataset(prefix: Path, num_documents: int = 40, seed: int = 0, tokenizer: Path | None = None) -> str:
    """Writes documents of 1 to 30 tokens, each ended by EOD; short ones, so that rows hold several.

    ``tokenizer``: a tokenizer.json beside ``prefix``, recorded as the one that produced them.
    """
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in random.integers(1, 30, num_documents):
            builder.add_document(np.append(random.integers(1, VOCAB, length), EOD))
        if tokenizer is None:
            builder.finalize(vocab_size=VOCAB, eod=EOD)
        else:
            loaded = Tokenizer.load(tokenizer)
            origin = {"tokenizer": tokenizer.name, "tokenizer_sha256": loaded.sha256}
            builder.finalize(vocab_size=loaded.vocab_size, eod=EOD, **origin)
    return str(prefix)


def settings(folder: Path, **groups: Any) -> dict[str, Any]:
    """A settings tree for a run over a dataset in ``folder``; ``groups`` are merged into it, field by field."""
    prefix = folder / "text"
    if not prefix.with_suffix(".idx").exists():
        write_dataset(prefix)
    tree: dict[str, Any] = {
        "model": dict(LLAMA),
        "data": {"train": str(prefix), "seq_length": SEQ, "eod_mask_loss": True},
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
        # AdamW divides a gradient that is zero up to rounding by eps: a higher rate would make that noise visible
        "optim": {"lr": 1e-3, "schedule": "constant", "clip_norm": 0.5},
        "precision": {"dtype": "float64"},
        "run": str(folder / "run"),
    }
    for name, group in groups.items():
        if isinstance(group, dict):
            tree[name] = {**tree.get(name, {}), **group}
        else:
            tree[name] = group
    return tree
