"""loader: rows have their positions in the global batch, and reading ahead changes only the speed."""

import threading

import numpy as np
import pytest

from megalith.data.gpt_dataset import GPTDataset, GPTSample, stack_samples
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.loader import StepLoader


@pytest.fixture
def dataset(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for length in (5, 30, 1, 80):
            builder.add_document(np.arange(length))
        builder.finalize(eod=0)
    return GPTDataset(tmp_path / "x", 8, seed=1)


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 8), (1, 2), (2, 2), (4, 1), (2, 4)])
def test_all_ranks_together_read_the_samples_of_the_step(dataset, dp_size, micro_batch):
    rows = {}
    for rank in range(dp_size):
        for batch in StepLoader(dataset, stack_samples, rank, dp_size).batch(24, 8, micro_batch):
            others = ("row_ids", "positions", "keeps_documents_apart", "num_tokens")
            per_token = {name: array for name, array in vars(batch).items() if name not in others}
            assert {array.shape for array in per_token.values()} == {(micro_batch, 8)}
            dtypes = [array.dtype for array in vars(batch).values()]
            assert dtypes == [np.int64, np.int64, np.bool_, np.int32, np.int64, np.bool_, np.int64, np.int64]
            assert batch.keeps_documents_apart.tolist() == [False] * micro_batch
            assert batch.num_tokens.tolist() == [8] * micro_batch
            assert batch.positions.tolist() == list(range(8))
            for row, index in enumerate(batch.row_ids.tolist()):
                rows[index] = [
                    vars(batch)[name][row] for name in ("tokens", "labels", "loss_mask", "documents", "num_tokens")
                ]
    assert sorted(rows) == list(range(8))
    for index, row in rows.items():
        sample = dataset[24 + index]
        for found, wanted in zip(row, vars(sample).values(), strict=True):
            assert np.array_equal(found, wanted)


def same(one, other):
    return all(
        np.array_equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(vars(left).values(), vars(right).values(), strict=True)
    )


def test_what_was_read_ahead_is_what_would_be_read(dataset):
    loader, plain = StepLoader(dataset, stack_samples, 0, 2), StepLoader(dataset, stack_samples, 0, 2)
    loader.prefetch(8, 8, 2)
    assert same(loader.batch(8, 8, 2), plain.batch(8, 8, 2))
    loader.prefetch(16, 8, 2)
    assert same(loader.batch(40, 8, 4), plain.batch(40, 8, 4))  # another step than announced, as after a resume
    assert same(loader.batch(16, 8, 2), plain.batch(16, 8, 2))


class Watched:
    """A dataset that records which thread reads, and fails from sample 100 on."""

    def __init__(self):
        self.threads = set()

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        if index >= 100:
            raise OSError(f"sample {index} cannot be read")
        row = np.full(4, index)
        return GPTSample(row, row, row > 0, row.astype(np.int32), len(row))


def test_reading_is_the_work_of_a_thread_and_its_errors_are_the_callers():
    watched = Watched()
    loader = StepLoader(watched, stack_samples, 0, 1)
    loader.prefetch(98, 2, 1)
    assert [batch.tokens[0, 0] for batch in loader.batch(98, 2, 1)] == [98, 99]
    loader.prefetch(100, 2, 1)
    with pytest.raises(OSError, match="sample 100 cannot be read"):
        loader.batch(100, 2, 1)
    assert threading.current_thread().name not in watched.threads
    assert [batch.tokens[0, 0] for batch in loader.batch(0, 2, 1)] == [0, 1]
