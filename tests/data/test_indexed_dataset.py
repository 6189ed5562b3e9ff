"""indexed_dataset: byte for byte Megatron's format, and files that are complete or absent."""

import json
import os
import pickle
import struct
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from megalith.data import index_file, indexed_dataset
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, best_dtype
from megalith.errors import DataError, StorageError
from tests.storage.memory_store import MemoryStore, OwnBytes

# worked out by hand from the format: uint16, sequences of 3, 2 and 4 tokens, the first two in one document
INDEX = bytes.fromhex(
    "4D4D4944494458 0000"  # MMIDIDX, two NUL
    "0100000000000000"  # version 1
    "08"  # uint16
    "0300000000000000 0300000000000000"  # 3 sequences, 2 documents + 1
    "03000000 02000000 04000000"  # lengths in tokens
    "0000000000000000 0600000000000000 0A00000000000000"  # offsets in bytes
    "0000000000000000 0200000000000000 0300000000000000"  # documents begin at sequences 0 and 2; the end
)
TOKENS = bytes.fromhex("0100 0200 0300  0400 0500  0600 0700 0800 FFFF")
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]


@pytest.fixture
def prefix(tmp_path):
    """The dataset above, without a sidecar, as Megatron would leave it; its name contains a dot."""
    (tmp_path / "corpus.v1.idx").write_bytes(INDEX)
    (tmp_path / "corpus.v1.bin").write_bytes(TOKENS)
    return tmp_path / "corpus.v1"


def rewrite(path, position, change):
    content = path.read_bytes()
    path.write_bytes(content[:position] + change + content[position + len(change) :])


def test_a_file_of_another_making_is_read_as_the_format_says(prefix):
    dataset = IndexedDataset(prefix)
    assert len(INDEX) == 94
    assert (len(dataset), dataset.num_documents, dataset.num_tokens, dataset.dtype) == (3, 2, 9, np.uint16)
    assert [dataset.get(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 65535]]
    assert dataset.get(2, 1, 2).tolist() == [7, 8]
    assert dataset.get(2, 4).tolist() == []
    assert dataset.document_starts().tolist() == [0, 5, 9]
    assert dataset.sidecar is None


def test_the_builder_writes_those_bytes(prefix, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "ours", np.uint16) as builder:
        builder.add_document([1, 2, 3, 4, 5], [3, 2])
        builder.write([6, 7])
        builder.write([8, 65535])
        builder.end_document()
        builder.finalize(eod=65535)
    assert (tmp_path / "ours.idx").read_bytes() == INDEX
    assert (tmp_path / "ours.bin").read_bytes() == TOKENS
    assert sorted(path.name for path in tmp_path.glob("*ours*")) == ["ours.bin", "ours.idx", "ours.json"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_sequences_come_back_in_every_type(dtype, tmp_path):
    random = np.random.default_rng(0)
    lengths = random.integers(0, 20, 1000)
    sequences = [random.integers(0, 127, n).astype(dtype) for n in lengths]
    documents = np.split(np.arange(1000), np.sort(random.integers(0, 1001, 300)))  # some have no sequence
    with IndexedDatasetBuilder(tmp_path / "x", dtype) as builder:
        for document in documents:
            tokens = np.concatenate([sequences[i] for i in document]) if document.size else np.array([], dtype)
            builder.add_document(tokens, lengths[document].tolist())
        builder.finalize()

    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == dtype
    assert all(np.array_equal(dataset.get(i), sequence) for i, sequence in enumerate(sequences))
    assert dataset.document_indices.tolist() == [0, *np.cumsum([len(document) for document in documents])]
    # parses the header independently
    magic, version, code, num_sequences, num_indices = struct.unpack("<9sQBQQ", (tmp_path / "x.idx").read_bytes()[:34])
    assert (magic, version, num_sequences, num_indices) == (b"MMIDIDX\0\0", 1, 1000, len(documents) + 1)
    assert code == DTYPES.index(dtype) + 1


def test_sizes_beyond_one_chunk_are_written_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(index_file, "_CHUNK", 3)
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        for n in range(10):
            builder.add_document(range(n))
        builder.finalize()
    assert [IndexedDataset(tmp_path / "x").get(i).tolist() for i in range(9)] == [list(range(n)) for n in range(1, 10)]
    rewrite(tmp_path / "x.idx", 34 + 4 * 9 + 8 * 7, (99).to_bytes(8, "little"))
    with pytest.raises(DataError, match="sequence 7 should begin at byte 112"):
        IndexedDataset(tmp_path / "x")


def test_empty_documents_and_empty_datasets_are_legal(tmp_path):
    for name, documents in {"gaps": [[], [1, 2], [], [3], []], "empty": [[], []], "none": []}.items():
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for document in documents:
                builder.add_document(document)
            sidecar = builder.finalize()
        dataset = IndexedDataset(tmp_path / name)
        starts = dataset.document_starts()
        assert [dataset.tokens[a:b].tolist() for a, b in pairwise(starts)] == documents
        assert sidecar.num_empty_documents == documents.count([])


def test_datasets_are_appended_with_their_documents(prefix, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "twice", np.uint16) as builder:
        builder.add_document([])
        for _ in range(2):
            builder.add_dataset(IndexedDataset(prefix))
        sidecar = builder.finalize()
    dataset = IndexedDataset(tmp_path / "twice")
    assert dataset.document_indices.tolist() == [0, 0, 2, 3, 5, 6]
    assert (tmp_path / "twice.bin").read_bytes() == 2 * TOKENS
    assert (sidecar.num_documents, sidecar.num_tokens, sidecar.num_empty_documents) == (5, 18, 1)
    with (
        IndexedDatasetBuilder(tmp_path / "wide", np.int32) as builder,
        pytest.raises(DataError, match="has dtype uint16; it must be int32"),
    ):
        builder.add_dataset(dataset)


def test_a_sequence_too_long_for_the_format_is_cut_within_its_document(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "_MAX_SEQUENCE_LENGTH", 4)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.write(range(3))
        builder.write(range(3, 10))
        builder.end_document()
        builder.add_document(range(4))
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.sequence_lengths.tolist() == [4, 4, 2, 4]
    assert dataset.document_indices.tolist() == [0, 3, 4]
    assert dataset.tokens[:10].tolist() == list(range(10))


def test_a_store_without_a_map_gives_the_same_tokens(prefix, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "ours", np.uint16) as builder:
        builder.add_dataset(IndexedDataset(prefix))
        builder.finalize(eod=5)
    store = MemoryStore(OwnBytes())
    for suffix in (".bin", ".idx", ".json"):
        store.put(f"corpus.v1{suffix}", (tmp_path / f"ours{suffix}").read_bytes())
    local, stored = IndexedDataset(tmp_path / "ours"), IndexedDataset(store / "corpus.v1")
    assert stored.sidecar == local.sidecar
    assert stored.document_starts().tolist() == [0, 5, 9]
    assert [stored.get(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 65535]]
    for tokens in (slice(None), slice(2, 5), slice(7, 100), slice(4, 4), slice(-3, None)):
        assert np.array_equal(stored.tokens[tokens], local.tokens[tokens])
        assert stored.tokens[tokens].dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        stored.tokens[0:2][0] = 1
    samples = [GPTDataset(dataset, 4, seed=1)[3].tokens.tolist() for dataset in (local, stored)]
    assert samples[0] == samples[1]
    with IndexedDatasetBuilder(tmp_path / "copied", np.uint16) as builder:
        builder.add_dataset(stored)
        builder.finalize()
    assert (tmp_path / "copied.bin").read_bytes() == TOKENS
    assert pickle.loads(pickle.dumps(stored)).get(1).tolist() == [4, 5]
    store.remove("corpus.v1.bin")
    with pytest.raises(DataError, match=r"memory:///corpus\.v1\.bin cannot be read .*check the path"):
        IndexedDataset(store / "corpus.v1")


def test_it_pickles_as_its_path(prefix):
    pickled = pickle.dumps(IndexedDataset(prefix))
    assert len(pickled) < 300
    assert pickle.loads(pickled).get(1).tolist() == [4, 5]


def test_vocabularies_choose_the_type_that_megatron_chooses():
    assert [best_dtype(size) for size in (100, 65499, 65500, 128_256)] == [np.uint16, np.uint16, np.int32, np.int32]


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, b"PK", r"corpus.v1.idx must begin with b'MMIDIDX"),
        (9, b"\2", r"must have version 1; it has version 2"),
        (17, b"\x09", r"must have one of the dtype codes 1 uint8, .* 8 uint16; it has 9"),
        (18, b"\4", r"must have 106 bytes for 4 sequences and 3 document indices; it has 94"),
        (25, b"\x40", r"must have \d+ bytes"),
        (34, b"\xff\xff\xff\xff", r"sequence 0 .* has length -1"),
        (38, b"\3", r"sequence 2 should begin at byte 12 .* it begins at 10"),
        (42, b"\5", r"corpus.v1.bin must have 20 bytes, as recorded in corpus.v1.idx; it has 18"),
        (54, b"\0", r"sequence 1 should begin at byte 6 .* it begins at 0"),
        (70, b"\1", r"should rise from 0 to 3.*they are \[1 2 3\]"),
        (78, b"\4", r"they are \[0 4 3\]"),
        (86, b"\2", r"they are \[0 2 2\]"),
    ],
)
def test_a_damaged_index_is_refused_by_name(prefix, position, change, message):
    rewrite(prefix.with_name("corpus.v1.idx"), position, change)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 20, 33, 34, 60, 93])
def test_an_index_cut_short_is_refused_by_name(prefix, size):
    os.truncate(prefix.with_name("corpus.v1.idx"), size)
    with pytest.raises(DataError, match=r"corpus.v1.idx must .* it has \d+"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 17, 19])
def test_tokens_of_another_size_are_refused_by_name(prefix, size):
    path = prefix.with_name("corpus.v1.bin")
    path.write_bytes((TOKENS + b"\0")[:size])
    with pytest.raises(DataError, match=rf"corpus.v1.bin must have 18 bytes, .* it has {size}: one of the two"):
        IndexedDataset(prefix)


def test_missing_and_foreign_files_say_what_is_wanted(prefix, tmp_path):
    with pytest.raises(DataError, match=r"other.idx cannot be read \(No such file.*check the path"):
        IndexedDataset(tmp_path / "other")
    with pytest.raises(DataError, match=r"PREFIX.bin and PREFIX.idx: leave out the .bin"):
        IndexedDataset(tmp_path / "corpus.v1.bin")
    (tmp_path / "corpus.v1.idx").write_bytes(INDEX + bytes(3))
    with pytest.raises(DataError, match="has a mode for each sequence"):
        IndexedDataset(prefix)
    prefix.with_name("corpus.v1.bin").unlink()
    (tmp_path / "corpus.v1.idx").write_bytes(INDEX)
    with pytest.raises(DataError, match=r"corpus.v1.bin cannot be read"):
        IndexedDataset(prefix)


def test_a_sidecar_of_other_files_is_refused(prefix):
    path = prefix.with_name("corpus.v1.json")
    path.write_text(json.dumps({"num_documents": 2, "num_sequences": 3, "num_tokens": 8, "bin_bytes": 16}))
    with pytest.raises(DataError, match=r"have \(2, 3, 9\) documents.* it describes \(2, 3, 8\)"):
        IndexedDataset(prefix)
    path.write_text("{")
    with pytest.raises(DataError, match=r"corpus.v1.json .* cannot be read"):
        IndexedDataset(prefix)


def test_a_request_outside_a_sequence_is_refused(prefix):
    dataset = IndexedDataset(prefix)
    for request in [(3,), (-1,), (0, 4), (0, -1), (0, 2, 2), (0, 2, -1)]:
        with pytest.raises(IndexError, match="; got "):
            dataset.get(*request)
    with pytest.raises(ValueError, match="read-only"):
        dataset.tokens[0] = 1


def test_the_builder_refuses_what_it_cannot_store(prefix, tmp_path):
    with pytest.raises(DataError, match=r"already contains corpus\.v1\.bin, corpus\.v1\.idx"):
        IndexedDatasetBuilder(prefix, np.uint16)
    with pytest.raises(DataError, match=r"tokens can be stored as uint8, .*; got complex128"):
        IndexedDatasetBuilder(tmp_path / "x", np.complex128)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for tokens in ([1, 65536], [-1], [0.5]):
            with pytest.raises(DataError, match="must fit in uint16"):
                builder.add_document(tokens)
        with pytest.raises(DataError, match="must be >= 0 and add up to 3 tokens"):
            builder.add_document([1, 2, 3], [1, 1])


def test_what_is_not_finalized_leaves_nothing(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([1, 2])
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource, sys
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with IndexedDatasetBuilder(sys.argv[1], "int32") as builder:
        for _ in range(100):
            builder.add_document(range(1000))
        builder.finalize()
except StorageError as error:
    sys.exit(str(error))
"""


def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path):
    # the kernel refuses the 100,001st byte of any file, like a full disk
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path / "x")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"cannot write {tmp_path / 'x.bin'}: File too large")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="File exists; move what is already there"):
        IndexedDatasetBuilder(tmp_path / "file" / "x", np.uint16)
