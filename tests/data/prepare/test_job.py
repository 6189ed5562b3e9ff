"""prepare: the same bytes however it is split, killed or moved; nothing is lost or incomplete."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.prepare import documents, parts, prepare
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.errors import ConfigError, DataError, MegalithError, StorageError
from megalith.storage import RunLock


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "_LEAST_BYTES", 4 * documents.BLOCK_BYTES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 0.8 MB in 5 parts: a .jsonl of 300 documents, one long text, a folder of three files."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 7))) for _ in range(500)]

    def text(num_words):
        return " ".join(chance.choices(words, k=num_words))

    with (folder / "a.jsonl").open("w") as file:
        for n in range(300):
            file.write(json.dumps({"text": text(chance.randint(0, 400)), "n": n}) + "\n")
    (folder / "b.txt").write_text("\n".join(text(12) for _ in range(6_000)))
    (folder / "src").mkdir()
    for name, content in {"x.py": text(50).encode(), "y.py": b"", "z.bin": b"\0\1"}.items():
        (folder / "src" / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def inputs(corpus):
    return [corpus / name for name in ("a.jsonl", "b.txt", "src")]


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory):
    """The digests after one process did the job without interruption."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_LEAST_BYTES", 4 * documents.BLOCK_BYTES)
        prepare(inputs, folder / "c", vocab_size=300, valid=0.1)
    return digests(folder)


def digests(folder):
    """Name and digest of every file, including hidden ones."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def documents_of(prefix):
    """The documents at ``prefix`` as text, without their last token, which must be eod."""
    dataset = IndexedDataset(prefix)
    tokenizer = Tokenizer.load(prefix.parent / dataset.sidecar.tokenizer)
    starts = dataset.document_starts()
    found = []
    for begin, end in pairwise(starts):
        ids = dataset.tokens[begin:end].tolist()
        assert not ids or ids.pop() == tokenizer.eod
        assert tokenizer.eod not in ids
        found.append(tokenizer.decode(ids))
    return found


def test_every_document_comes_back_in_one_of_the_two_sets(inputs, corpus, tmp_path):
    seen = []
    summary = prepare(
        inputs, tmp_path / "c", vocab_size=300, valid=0.1, progress=lambda *progress: seen.append(progress)
    )
    texts = [json.loads(line)["text"] for line in (corpus / "a.jsonl").read_text().splitlines()]
    texts += [(corpus / name).read_text() for name in ("b.txt", "src/x.py", "src/y.py")]
    train, valid = documents_of(tmp_path / "c"), documents_of(tmp_path / "c-valid")
    assert sorted(train + valid) == sorted(texts)
    assert len(valid) == pytest.approx(30, abs=12)

    assert (summary.num_documents, summary.num_tokens) == (len(train), IndexedDataset(tmp_path / "c").num_tokens)
    assert summary.train.num_empty_documents == train.count("")
    assert summary.train.text_bytes + summary.valid.text_bytes == sum(len(text) for text in texts)
    assert summary.train.num_skipped_files == 1
    assert [record.name for record in summary.train.sources] == ["a.jsonl", "b.txt", "src"]
    assert sorted(summary.files) == sorted(tmp_path.iterdir())
    assert [phase for phase, done, total in seen if done == total] == ["tokenizer", "encode", "join"]
    assert not summary.was_done


def test_the_tokenizer_is_trained_on_what_is_not_held_out(inputs, expected, tmp_path):
    prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1)
    assert digests(tmp_path) == expected
    assert train_byte_level_bpe(documents_of(tmp_path / "c"), 300).sha256 == expected["c-tokenizer.json"]
    assert IndexedDataset(tmp_path / "c").sidecar.tokenizer_sha256 == expected["c-tokenizer.json"]


def test_three_processes_write_the_bytes_of_one(inputs, expected, tmp_path):
    prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1, processes=3)
    assert digests(tmp_path) == expected


def test_the_folder_that_the_inputs_lie_in_does_not_matter(inputs, corpus, expected, tmp_path):
    moved = corpus.rename(corpus.with_name("moved"))
    try:
        prepare([moved / path.name for path in inputs], tmp_path / "c", vocab_size=300, valid=0.1)
    finally:
        moved.rename(corpus)
    assert digests(tmp_path) == expected


JOB = """
import multiprocessing, sys, time
from megalith.data.prepare import documents, parts, prepare
parts._LEAST_BYTES = 4 * documents.BLOCK_BYTES
moment, out, *inputs = sys.argv[1:]
def progress(phase, done, total):
    if phase == moment and done > 0:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(60)
if __name__ == "__main__":
    prepare(inputs, out, vocab_size=300, valid=0.1, processes=2, progress=progress)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("moment", ["tokenizer", "encode", "join"])
def test_a_job_that_was_killed_ends_with_the_same_bytes(moment, inputs, expected, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    out = tmp_path / "out" / "c"
    command = [sys.executable, str(tmp_path / "job.py"), moment, str(out), *map(str, inputs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        workers = job.stdout.readline().split()
        job.send_signal(signal.SIGKILL)
    assert job.returncode == -signal.SIGKILL
    assert len(workers) == (2 if moment == "encode" else 0)
    assert not out.with_suffix(".idx").exists()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive the process that started them"
        time.sleep(0.05)

    finished = len(list(out.parent.glob("c.parts/*/*-train.idx")))
    assert {"tokenizer": finished == 0, "encode": finished > 0, "join": finished == 5}[moment]
    seen = []
    prepare(inputs, out, vocab_size=300, valid=0.1, progress=lambda phase, done, total: seen.append(phase))
    assert seen.count("encode") == 1 + 5 - finished  # finished parts are not repeated
    assert digests(out.parent) == expected


def test_a_job_killed_while_it_publishes_ends_with_the_same_bytes(inputs, expected, tmp_path, monkeypatch):
    replace = os.replace

    def killed(origin, target):
        if target == tmp_path / "c.bin":
            raise KeyboardInterrupt
        replace(origin, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1)
    monkeypatch.setattr(os, "replace", replace)
    assert (tmp_path / "c-valid.idx").exists()
    assert not (tmp_path / "c.idx").exists()
    prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1)
    assert digests(tmp_path) == expected


def test_the_identical_job_does_nothing_and_another_is_refused(inputs, expected, tmp_path):
    first = prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1, processes=2)
    assert again.was_done
    assert (again.train, again.valid, again.files) == (first.train, first.valid, first.files)
    for other in ({"valid": 0.2}, {"vocab_size": 301}, {"valid": 0.0}):
        with pytest.raises(DataError, match=r"c already exists: .* contains .*c\.bin, .*will not be overwritten"):
            prepare(inputs, tmp_path / "c", **{"vocab_size": 300, "valid": 0.1, **other})
    with pytest.raises(DataError, match="c already exists"):
        prepare(inputs[:2], tmp_path / "c", vocab_size=300, valid=0.1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


@pytest.fixture
def small(tmp_path):
    """Twenty short files in a separate folder."""
    folder = tmp_path / "small"
    folder.mkdir()
    for n in range(20):
        (folder / f"{n:02}.txt").write_text(f"text number {n}\n" * 20)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("name", ["c.bin", "c.json", "c-valid.idx", "c-tokenizer.json"])
def test_a_file_of_somebody_else_is_never_overwritten(name, small, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("theirs")
    with pytest.raises(DataError, match=rf"contains {name}, which will not be overwritten; choose another --out"):
        prepare(small, tmp_path / "out" / "c", vocab_size=260, valid=0.5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_files_can_be_held_out_by_name(small, tmp_path):
    summary = prepare(small[:15], tmp_path / "c", vocab_size=260, valid=small[15:])
    assert documents_of(tmp_path / "c") == [path.read_text() for path in small[:15]]
    assert documents_of(tmp_path / "c-valid") == [path.read_text() for path in small[15:]]
    assert [record.name for record in summary.valid.sources] == [path.name for path in small[15:]]
    with pytest.raises(DataError, match=r"15\.txt is given twice"):
        prepare(small, tmp_path / "d", vocab_size=260, valid=small[15:])


def test_a_given_tokenizer_is_named_by_its_path_from_the_data(small, tmp_path):
    (tmp_path / "tokenizers").mkdir()
    tokenizer = train_byte_level_bpe([path.read_text() for path in small], 270)
    tokenizer.save(tmp_path / "tokenizers" / "t.json")
    summary = prepare(small, tmp_path / "out" / "c", tokenizer=tmp_path / "tokenizers" / "t.json")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["c.bin", "c.idx", "c.json"]
    sidecar = IndexedDataset(tmp_path / "out" / "c").sidecar
    assert (sidecar.tokenizer, sidecar.tokenizer_sha256) == ("../tokenizers/t.json", tokenizer.sha256)
    assert (sidecar.vocab_size, sidecar.eod, summary.tokenizer) == (270, 0, tmp_path / "tokenizers" / "t.json")
    assert documents_of(tmp_path / "out" / "c") == [path.read_text() for path in small]


def test_another_end_of_document_can_be_chosen(small, tmp_path):
    train_byte_level_bpe(["x"], 257).save(tmp_path / "t.json")
    prepare(small[:1], tmp_path / "c", tokenizer=tmp_path / "t.json", eod="!")
    dataset = IndexedDataset(tmp_path / "c")
    assert (dataset.sidecar.eod, dataset.tokens[-1]) == (1, 1)  # the first byte after the special token


def test_a_folder_can_take_its_own_dataset(small):
    folder = small[0].parent
    for _ in range(2):
        summary = prepare([folder], folder / "c", vocab_size=260)
    assert summary.was_done
    assert summary.num_documents == 20


def test_an_input_that_is_no_text_stops_everything_and_leaves_nothing(small, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"texts": "y"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, must have its text under 'text'; it has 'texts'"):
        prepare([*small, tmp_path / "a.jsonl"], tmp_path / "out" / "c", vocab_size=260)
    train_byte_level_bpe(["x"], 257).save(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        prepare([*small, tmp_path / "a.jsonl"], tmp_path / "out" / "c", tokenizer=tmp_path / "t.json")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("texts", "valid", "message"),
    [
        (["", ""], 0.0, "the inputs must contain text; there is none in 2 documents"),
        ([""], 0.0, "the inputs must contain text; there is none in 1 document"),
        (["text"], 0.02, "no text is left for the validation set: .* the inputs have 1; use another fraction"),
        (["text"], 0.99999, "no text is left for the training set"),
    ],
)
def test_a_set_without_text_is_refused(texts, valid, message, tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(len(texts))]
    for path, text in zip(files, texts, strict=True):
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        prepare(files, tmp_path / "out" / "c", vocab_size=260, valid=valid)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ConfigError, "either --tokenizer PATH .* or --vocab-size N"),
        ({"tokenizer": "t.json", "vocab_size": 300}, ConfigError, "either --tokenizer"),
        ({"vocab_size": 300, "eod": "x"}, ConfigError, "--eod requires --tokenizer"),
        ({"vocab_size": 300, "valid": 1.0}, ConfigError, "below 1; got 1.0"),
        ({"vocab_size": 300, "valid": -0.1}, ConfigError, "at least 0"),
        ({"vocab_size": 256}, ConfigError, "at least 257"),
        ({"tokenizer": "gone.json"}, DataError, r"gone\.json must be a tokenizer\.json"),
        ({"vocab_size": 300, "out": "."}, ConfigError, "must be a file name prefix, not a folder"),
        ({"vocab_size": 300, "inputs": []}, DataError, "at least one file"),
        ({"vocab_size": 300, "inputs": ["gone.txt"]}, DataError, r"gone\.txt cannot be read"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    settings, error, message, small, tmp_path, monkeypatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(error, match=message):
        prepare(**{"inputs": small, "out": "c", **settings})
    assert not list(Path().iterdir())


def test_one_job_at_a_time(small, tmp_path):
    with RunLock(tmp_path / "c.parts"), pytest.raises(StorageError, match=r"another process is preparing .*/c; wait"):
        prepare(small, tmp_path / "c", vocab_size=260)


FULL_DISK = """
import resource, sys
from megalith.data.prepare import prepare
from megalith.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    prepare(sys.argv[3:], sys.argv[2], vocab_size=260)
except StorageError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("limit", [5_000, 60_000])
def test_a_full_disk_leaves_no_file_and_the_next_run_goes_on(limit, corpus, tmp_path):
    # the kernel refuses larger files, like a full disk: first the tokenizer's, then a part's
    command = [sys.executable, "-c", FULL_DISK, str(limit), str(tmp_path / "c"), str(corpus / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "cannot write" in done.stderr
    assert f"finished parts are kept in {tmp_path / 'c.parts'}: run the same command again" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.parts"]
    summary = prepare([corpus / "a.jsonl"], tmp_path / "c", vocab_size=260)
    assert sorted(summary.files) == sorted(tmp_path.iterdir())


def test_a_worker_that_is_killed_is_told_and_the_next_run_goes_on(inputs, expected, tmp_path):
    others = {child.pid for child in multiprocessing.active_children()}  # ranks that other tests will use

    def kill_a_worker(phase, done, total):
        if phase == "encode" and done > 0:
            for child in multiprocessing.active_children():
                if child.pid not in others:
                    os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(
        MegalithError, match=r"one of 2 worker processes that encode text was killed.*fewer --processes"
    ):
        prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1, processes=2, progress=kill_a_worker)
    prepare(inputs, tmp_path / "c", vocab_size=300, valid=0.1)
    assert digests(tmp_path) == expected


MEMORY = """
import re, sys
from megalith.data.prepare import prepare
prepare(sys.argv[2:], sys.argv[1], vocab_size=260)
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def test_memory_does_not_grow_with_the_input(tmp_path):
    # one document; encoding 1 MB at once takes 250 MB, 250 bytes per byte
    peaks = []
    for num_lines in (20_000, 200_000):
        path = tmp_path / f"{num_lines}.txt"
        path.write_text("".join(f"{n % 9973}\n" for n in range(num_lines)))
        command = [sys.executable, "-c", MEMORY, str(tmp_path / f"{num_lines}"), str(path)]
        peaks.append(1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 25e6
