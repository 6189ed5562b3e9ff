"""Dataset fingerprints: equal for equal documents, wherever they are stored, different for others, and cheap."""

import hashlib

import numpy as np
import pytest

from megalith.data import fingerprint as module
from megalith.data.fingerprint import fingerprint
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tests.tiny_run import SEQ, write_dataset


def of(documents, prefix, dtype=np.uint16, **origin):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize(**origin)
    dataset = IndexedDataset(prefix)
    return fingerprint(dataset.tokens, dataset.document_starts())


DOCUMENTS = [[5, 6, 7], [8], [9, 10]]
OTHERS = {
    "another token": [[5, 6, 7], [8], [9, 11]],
    "another order": [[8], [5, 6, 7], [9, 10]],
    "another border, the same tokens": [[5, 6], [7, 8], [9, 10]],
    "a document more": [*DOCUMENTS, [4]],
    "an empty document more": [*DOCUMENTS, []],
    "a document less": DOCUMENTS[:-1],
}


def test_it_is_the_hash_of_tokens_and_documents(tmp_path):
    tokens, starts = np.array([5, 6, 7, 8, 9, 10]), np.array([0, 3, 4, 6])
    content = b"".join(
        values.astype("<i8").tobytes() + len(values).to_bytes(8, "little") for values in (tokens, starts)
    )
    name = hashlib.sha256(content).hexdigest()[:32]
    assert of(DOCUMENTS, tmp_path / "a") == f"{name} (6 tokens in 3 documents)"


def test_place_type_on_disk_and_sidecar_do_not_count(tmp_path):
    first = of(DOCUMENTS, tmp_path / "a")
    assert of(DOCUMENTS, tmp_path / "b", np.int32, vocab_size=61, eod=0) == first
    (tmp_path / "b.json").unlink()
    moved = IndexedDataset(tmp_path / "b")
    assert fingerprint(moved.tokens, moved.document_starts()) == first


@pytest.mark.parametrize("documents", OTHERS.values(), ids=OTHERS)
def test_other_documents_have_another_name(tmp_path, documents):
    assert of(documents, tmp_path / "a") != of(DOCUMENTS, tmp_path / "b")


class Counted:
    """A given number of tokens without their bytes; counts what is read."""

    def __init__(self, num_tokens: int, changed_at: int = -1) -> None:
        self.num_tokens, self.changed_at, self.reads = num_tokens, changed_at, []

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, tokens: slice):
        self.reads.append(tokens.stop - tokens.start)
        positions = np.arange(tokens.start, tokens.stop)
        return positions % 50_000 + (positions == self.changed_at)


def test_a_terabyte_costs_sixteen_small_reads_and_its_ends_are_among_them():
    N, starts = 500_000_000_000, np.array([0, 500_000_000_000])
    whole = Counted(N)
    name = fingerprint(whole, starts)
    assert whole.reads == [4096] * 16
    assert fingerprint(Counted(N), starts) == name
    for place in (0, N - 1, N // 15):
        assert fingerprint(Counted(N, changed_at=place), starts) != name
    assert fingerprint(Counted(N + 1), starts) != name
    assert fingerprint(Counted(N, changed_at=10_000), starts) == name, "the page says that it is not noticed"


def test_where_all_is_read_and_where_blocks_begin(monkeypatch):
    monkeypatch.setattr(module, "_ALL", 100)
    monkeypatch.setattr(module, "_BLOCK", 4)
    starts = np.array([0])
    for N, reads in ((100, [100]), (101, [4] * 16)):
        tokens = Counted(N)
        fingerprint(tokens, starts)
        assert tokens.reads == reads


def test_a_dataset_tells_its_text_and_the_tokenizer_that_its_sidecar_names(tmp_path):
    prefix = write_dataset(tmp_path / "text")
    identity = GPTDataset(prefix, SEQ, seed=1).identity()
    assert identity == GPTDataset(prefix, 2 * SEQ, seed=2, mask_eod=True).identity(), "neither is the dataset's own"
    assert identity["tokenizer"] is None
    assert of(DOCUMENTS, tmp_path / "a", tokenizer_sha256="ab") in GPTDataset(tmp_path / "a", 2, 1).identity().values()
    assert GPTDataset(tmp_path / "a", 2, 1).identity()["tokenizer"] == "ab"
