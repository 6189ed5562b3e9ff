"""Small indexes of random embeddings, in many small files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.models.retrieval import write_index
from megalith.models.retrieval.passage_index import Passage, PassageIndex

__all__ = ["embeddings", "made"]


def embeddings(num_passages: int = 50, size: int = 8, seed: int = 0) -> Tensor:
    """Random embeddings [N, D] in float32; every third is equal to the one in the middle."""
    drawn = np.random.default_rng(seed).standard_normal((num_passages, size), np.float32)
    drawn[::3] = drawn[num_passages // 2]
    return torch.from_numpy(drawn)


def made(
    folder: Path, found: Tensor, dtype: str = "float32", *, rows_per_file: int = 7, per_batch: int = 9
) -> PassageIndex:
    """Writes ``folder`` with a text for each row of ``found``, and opens it."""
    passages = [Passage(f"text {number}, über", f"{number % 3}.jsonl", number) for number in range(len(found))]
    starts = range(0, len(found), per_batch)
    batches = ((found[start : start + per_batch], passages[start : start + per_batch]) for start in starts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_index, "_SHARD_BYTES", rows_per_file * found.shape[1] * getattr(torch, dtype).itemsize)
        write_index.write_index(folder, batches, dtype=dtype, model={"path": "somewhere", "seq_length": 32})
    return PassageIndex.open(folder)
