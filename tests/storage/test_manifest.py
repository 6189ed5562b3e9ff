"""The manifest: SHA-256 as in the standard, and every changed bit is detected."""

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleBuffer
from threading import Semaphore

import numpy as np
import pytest

from megalith.errors import CheckpointError, StorageError
from megalith.storage import (
    MANIFEST,
    FileRecord,
    LocalStore,
    Recorder,
    has_all_files,
    manifest_of,
    read_manifest,
    record_of,
)

# FIPS 180-4's example: one block, "abc"
ABC = FileRecord(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.json").write_text("abc")
    (tmp_path / MANIFEST).write_bytes(manifest_of({"a.json": ABC}))
    return tmp_path


def test_a_record_holds_size_and_sha256(folder):
    assert record_of([b"a", b"", b"bc"]) == record_of(LocalStore(folder).parts("a.json")) == ABC


def test_a_manifest_reads_back_and_is_plain_json(folder):
    assert read_manifest(LocalStore(folder)) == {"a.json": ABC}
    content = json.loads((folder / MANIFEST).read_text())
    assert content["files"] == {"a.json": {"bytes": 3, "sha256": ABC.sha256}}
    assert (content["format"], content["version"]) == ("megalith checkpoint", 1)


def test_a_flipped_bit_of_any_byte_of_a_manifest_is_blamed_on_the_manifest(folder):
    sound = (folder / MANIFEST).read_bytes()
    for place in range(len(sound)):
        flipped = bytearray(sound)
        flipped[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=re.escape(MANIFEST)):
            read_manifest(LocalStore(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"format": "megalith checkpoint"}', "is damaged: KeyError"),
        (None, f"is not a complete checkpoint: it has no {MANIFEST}"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(LocalStore(tmp_path))
    assert not has_all_files(LocalStore(tmp_path))


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"a.json": 3},
        {"a.json": {"bytes": 3}},
        {"a.json": {"bytes": "3", "sha256": ""}},
        {"a.json": {"bytes": 3, "sha256": "", "mode": 0}},
        {"../a.json": {"bytes": 3, "sha256": ""}},
        {"/a.json": {"bytes": 3, "sha256": ""}},
        {"a\0.json": {"bytes": 3, "sha256": ""}},
    ],
)
def test_a_table_of_another_form_is_refused_though_its_digest_is_right(tmp_path, table):
    digest = hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest()
    content = {"format": "megalith checkpoint", "version": 1, "files": table, "sha256": digest}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(LocalStore(tmp_path))


def test_all_files_are_there_in_their_sizes_or_not(folder):
    assert has_all_files(LocalStore(folder))
    (folder / "a.json").write_text("ab")
    assert not has_all_files(LocalStore(folder))
    (folder / "a.json").unlink()
    assert not has_all_files(LocalStore(folder))


def test_a_manifest_of_another_version_is_refused_and_not_taken_for_damaged(folder):
    content = (folder / MANIFEST).read_text().replace('"version": 1', '"version": 2')
    (folder / MANIFEST).write_text(content)
    for read in (read_manifest, has_all_files):
        with pytest.raises(
            CheckpointError, match=r"must have format .* 1\); got \('megalith checkpoint', 2\); use the"
        ):
            read(LocalStore(folder))


@pytest.mark.parametrize("file", [MANIFEST, "a.json"])
def test_a_disk_that_does_not_answer_is_not_taken_for_damage(folder, monkeypatch, file):
    stat, read_bytes = Path.stat, Path.read_bytes

    def fail_on(function):
        def use(path, **kwargs):
            if path.name == file:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(path, **kwargs)

        return use

    monkeypatch.setattr(Path, "stat", fail_on(stat))
    monkeypatch.setattr(Path, "read_bytes", fail_on(read_bytes))
    with pytest.raises(StorageError, match=r"cannot read .*: Input/output error; check the disk"):
        has_all_files(LocalStore(folder))


@pytest.mark.parametrize("sizes", [[0, 5, 0], [(1 << 20) - 1, 1 << 20, 3], [(70 << 20) + 7, 1, 33 << 20]], ids=str)
def test_a_file_of_large_parts_is_written_and_hashed_as_a_whole(sizes, tmp_path):
    content = np.random.default_rng(1).bytes(sum(sizes))
    ends = np.cumsum(sizes).tolist()

    def parts() -> Iterator[memoryview]:
        for size, end in zip(sizes, ends, strict=True):
            part = bytearray(content[end - size : end])
            yield memoryview(part)
            part[:] = bytes(size)  # as a buffer that is used again

    recorder = Recorder(parts())
    LocalStore(tmp_path).write("file", recorder)
    assert (tmp_path / "file").read_bytes() == content
    assert recorder.record() == FileRecord(len(content), hashlib.sha256(content).hexdigest())


def test_a_disk_that_fails_while_more_is_written_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("megalith.storage.local_store._flush", fail)
    with pytest.raises(StorageError, match=r"cannot write .*/file: Input/output error"):
        LocalStore(tmp_path).write("file", [bytes(40 << 20)] * 2)
    LocalStore(tmp_path).write("small", [bytes(1 << 20)] * 2)  # flushed as a whole


class SlowHash:
    """Holds what it hashes for a while, as SHA-256 does with a large block."""

    begun = Semaphore(0)

    def update(self, block: memoryview) -> None:
        held = PickleBuffer(block)  # as C code does; a memoryview would not hold the block itself
        self.begun.release()
        time.sleep(0.1)
        held.release()


def test_a_write_that_fails_while_a_block_is_hashed_raises_its_error_alone(monkeypatch):
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_value))
    monkeypatch.setattr("megalith.storage.manifest.hashlib.sha256", SlowHash)

    def write(parts: Recorder) -> None:
        for number, _ in enumerate(parts):
            assert SlowHash.begun.acquire(timeout=60)
            if number == 1:
                raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write(Recorder([bytearray(2 << 20)] * 3))
    assert ignored == []
