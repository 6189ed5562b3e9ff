"""Converts text files to an indexed dataset, in several processes and in constant memory.

The job is split into parts (``parts.py``), which the processes encode into ``PREFIX.parts/``. One pass joins them,
moves the files into place, and removes the folder. A job that was killed resumes from its finished parts there, which
are stored under the fingerprint of its inputs and settings; the result is identical to that of an uninterrupted job.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.data.chat.format import ChatFormat
from megalith.data.chat.turn_ends import turn_ends
from megalith.data.index_file import companion
from megalith.data.indexed_dataset import IndexedDatasetBuilder, best_dtype, files_of, remove_dataset
from megalith.data.prepare.checks import check_begins, check_chats, check_prefix, check_tokenizer_choice
from megalith.data.prepare.documents import BLOCK_BYTES
from megalith.data.prepare.parts import (
    Encoding,
    Part,
    Split,
    append_part,
    plan_parts,
    settled_fraction,
    training_parts,
    training_texts,
)
from megalith.data.prepare.sources import Sources, find_sources
from megalith.data.prepare.workers import encode_parts
from megalith.data.sidecar import Sidecar
from megalith.data.special_tokens import SPECIAL_TOKENS, text_frame
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.errors import ConfigError, DataError, StorageError
from megalith.storage import LocalStore, RunLock, explained, fsync_folder
from megalith.wording import counted

__all__ = ["PrepareSummary", "Progress", "prepare"]

Progress = Callable[[str, int, int], None]  # phase, bytes done, total bytes

_FORMAT_VERSION = 3  # increase it whenever the output changes for the same inputs and settings
_CHAT_VERSION = 2  # the same for conversations alone; 2: the sidecar has their template and end tokens
_PUBLISHING = "publishing"  # marker file: the job has begun to move its files into place


@dataclass(frozen=True)
class PrepareSummary:
    """The dataset that exists now, and its ``sources``. ``was_done``: an earlier identical job had finished it."""

    prefix: Path
    valid_prefix: Path | None
    train: Sidecar
    valid: Sidecar | None
    tokenizer: Path
    sources: Sources
    was_done: bool

    @property
    def num_documents(self) -> int:
        """Number of documents in the training set."""
        return self.train.num_documents

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the training set."""
        return self.train.num_tokens

    @property
    def files(self) -> list[Path]:
        """All files of the dataset."""
        prefixes = [self.prefix] if self.valid_prefix is None else [self.prefix, self.valid_prefix]
        return [*(path for prefix in prefixes for path in files_of(prefix)), self.tokenizer]


@dataclass(frozen=True)
class _Job:
    """The resolved command. ``tokenizer``: None if one is to be trained."""

    sources: Sources
    out: Path
    tokenizer: Tokenizer | None
    tokenizer_path: Path
    vocab_size: int | None
    valid_fraction: float
    key: str
    split_sentences: bool
    bos: bool
    kinds: tuple[str, ...]  # of special tokens, for the tokenizer to be trained
    chat: ChatFormat | None

    @property
    def valid_out(self) -> Path:
        return companion(self.out, "-valid")

    def prefix(self, split: Split) -> Path:
        return self.out if split == "train" else self.valid_out

    @property
    def splits(self) -> tuple[Split, ...]:
        has_valid = self.valid_fraction > 0 or any(source.held_out for source in self.sources.files)
        return ("valid", "train") if has_valid else ("train",)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer to be trained; two kinds of model may share some."""
        return tuple(dict.fromkeys(token for kind in self.kinds for token in SPECIAL_TOKENS[kind]))

    @property
    def frame(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tokens that the tokenizer to be trained puts before and after a text in transformers."""
        return text_frame(self.kinds)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the output depends on."""
        files = [
            (os.fsencode(s.key).hex(), s.size, s.modified, s.format, s.is_compressed, s.held_out)
            for s in self.sources.files
        ]
        tokenizer = self.vocab_size if self.tokenizer is None else (self.tokenizer.sha256, self.tokenizer.eod)
        content = [_FORMAT_VERSION, BLOCK_BYTES, files, self.key, self.valid_fraction, tokenizer]
        if self.split_sentences or self.special_tokens:  # added conditionally, to keep earlier fingerprints valid
            content += [self.split_sentences, self.special_tokens]
        if self.begin:  # same
            content += [self.begin]
        if any(self.frame):  # same
            content += [self.frame]
        if self.chat is not None:  # same
            content += [_CHAT_VERSION, dataclasses.astuple(self.chat)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def begin(self) -> tuple[int, ...]:
        """Token ids prepended to every document; a tokenizer that is trained here prepends none."""
        return self.tokenizer.begin if self.tokenizer is not None and self.bos and not self.split_sentences else ()

    def targets(self) -> list[Path]:
        """The files that the job creates."""
        files = [path for split in self.splits for path in files_of(self.prefix(split))]
        return files + ([self.tokenizer_path] if self.tokenizer is None else [])


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    valid: float | Sequence[str | Path] = 0.0,
    key: str = "text",
    eod: str | None = None,
    split_sentences: bool = False,
    bos: bool = True,
    special_tokens: Sequence[str] = (),
    chat: ChatFormat | None = None,
    processes: int = 1,
    progress: Progress = lambda phase, done, total: None,
) -> PrepareSummary:
    """Tokenizes ``inputs`` (files and folders, see ``sources.py``) into ``out.bin``, ``out.idx`` and ``out.json``.

    Args:
        tokenizer: a tokenizer.json; or
        vocab_size: size of a byte-level BPE tokenizer to train on the training documents, saved as
            ``out-tokenizer.json``.
        valid: what to hold out into ``out-valid``: a share of the documents, chosen by a hash of their names (at least
            one of two or more documents), or these files.
        key: the field of .jsonl and column of .parquet that holds the text.
        eod: the end-of-document token, for tokenizers without one of the usual names.
        split_sentences: write one sequence per sentence (``sentences.py``), as BERT and T5 need, not per document.
        bos: prepend ``Tokenizer.begin`` to documents, unless ``split_sentences`` is set.
        special_tokens: add special tokens to the trained tokenizer, for "bert", "t5" or "fim". With "bert" or "t5",
            but not both, its file also makes transformers add the tokens that the model expects around a text.
        chat: the inputs hold conversations (``chat/encoder.py``), not texts; ``key`` is not used. Needs ``tokenizer``.
        processes: encoding processes. With more than one, a script must call this under ``if __name__ == "__main__"``.
        progress: called now and then with the phase, the bytes done and the total.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: an input is invalid, or ``out`` holds other data; nothing is overwritten.
        StorageError: the disk is full, or another process is working on ``out``.
    """
    check_tokenizer_choice(tokenizer, vocab_size, eod, special_tokens)
    sources, fraction = _find(inputs, Path(out), valid)
    out = Path(os.path.abspath(out))
    given = None if tokenizer is None else Tokenizer.load(tokenizer, eod)
    check_begins(given, bos=bos, split_sentences=split_sentences)
    if chat is not None:
        check_chats(sources, chat, given, split_sentences=split_sentences)
    path = _trained(out) if tokenizer is None else Path(os.path.abspath(tokenizer))
    job = _Job(sources, out, given, path, vocab_size, fraction, key, split_sentences, bos, tuple(special_tokens), chat)
    return _ensure_done(job, processes, progress)


def _find(inputs: Sequence[str | Path], out: Path, valid: float | Sequence[str | Path]) -> tuple[Sources, float]:
    """The files to read, and the share of their documents to hold out."""
    check_prefix(out)
    fraction, held_out = (float(valid), ()) if isinstance(valid, int | float) else (0.0, tuple(valid))
    if not 0 <= fraction < 1:
        raise ConfigError(
            f"--valid must be a fraction of the documents, at least 0 and below 1; got {fraction}; use 0.02"
        )
    if not inputs:
        raise DataError("give at least one file or folder of text")
    out = Path(os.path.abspath(out))
    own = [*files_of(out), *files_of(companion(out, "-valid")), _trained(out), companion(out, ".parts")]
    return find_sources(inputs, held_out, own), fraction


def _trained(out: Path) -> Path:
    """The path of a trained tokenizer."""
    return companion(out, "-tokenizer.json")


def _ensure_done(job: _Job, processes: int, progress: Progress) -> PrepareSummary:
    """Runs what is left of ``job``, under a lock; removes the folder of its parts when they are no longer useful."""
    folder = companion(job.out, ".parts")
    with _lock(folder, job.out):
        try:
            summary = _finished(job, folder) or _run(job, folder / job.fingerprint[:16], processes, progress)
            shutil.rmtree(folder, ignore_errors=True)
        except (ConfigError, DataError):
            # a corrected input has another fingerprint, so these parts are useless; parts of other jobs are kept
            shutil.rmtree(folder / job.fingerprint[:16], ignore_errors=True)
            raise
        except StorageError as error:
            raise StorageError(f"{error}; finished parts are kept in {folder}: run the same command again") from error
        finally:
            if not any(folder.glob("*/")):
                shutil.rmtree(folder, ignore_errors=True)
    return summary


def _finished(job: _Job, folder: Path) -> PrepareSummary | None:
    """The result of an identical job that has finished, if any. Raises DataError if ``job`` would overwrite a file."""
    present = [path for path in job.targets() if path.exists()]
    if len(present) == len(job.targets()):
        sidecars = {
            split: Sidecar.read(LocalStore(job.out.parent), f"{job.prefix(split).name}.json") for split in job.splits
        }
        train = sidecars["train"]
        if train is not None and train.job == job.fingerprint:
            return _summary(job, train, sidecars.get("valid"), was_done=True)
    if present and not (folder / job.fingerprint[:16] / _PUBLISHING).exists():
        names = ", ".join(path.name for path in present)
        raise DataError(
            f"{job.out} already exists: {job.out.parent} contains {names}, which will not be overwritten; choose "
            "another --out, or move the files away"
        )
    return None


def _run(job: _Job, folder: Path, processes: int, progress: Progress) -> PrepareSummary:
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    parts = plan_parts(job.sources.files)
    fraction = settled_fraction(parts, None if job.chat else job.key, job.valid_fraction)
    tokenizer = _settle_tokenizer(job, parts, fraction, folder / "tokenizer.json", progress)
    encoding = Encoding(folder, tokenizer.eod, job.begin, job.key, fraction, job.splits, job.split_sentences, job.chat)
    encode_parts(encoding, parts, processes, lambda done, total: progress("encode", done, total))
    return _publish(job, parts, encoding, tokenizer, progress)


def _settle_tokenizer(job: _Job, parts: Sequence[Part], fraction: float, path: Path, progress: Progress) -> Tokenizer:
    """Saves the job's tokenizer in ``path``, where all processes and a resumed job read it, and returns it."""
    if job.tokenizer is not None:
        job.tokenizer.save(path)
        return job.tokenizer
    if path.exists():
        return Tokenizer.load(path)
    assert job.vocab_size is not None, "either a tokenizer or a vocabulary size is given"
    texts = _training_texts(job, parts, fraction, progress)
    tokenizer = train_byte_level_bpe(texts, job.vocab_size, job.special_tokens, job.frame)
    tokenizer.save(path)
    return tokenizer


def _training_texts(job: _Job, parts: Sequence[Part], fraction: float, progress: Progress) -> Iterator[str]:
    total = sum(part.num_bytes for part in parts)
    for text, done in training_texts(parts, job.key, fraction):
        progress("tokenizer", done, total)
        yield text
    progress("tokenizer", total, total)


def _publish(
    job: _Job, parts: Sequence[Part], encoding: Encoding, tokenizer: Tokenizer, progress: Progress
) -> PrepareSummary:
    """Joins the parts and moves the files into place, the .idx of the training set last."""
    folder = encoding.folder
    with explained("write", folder):
        (folder / _PUBLISHING).touch()
        fsync_folder(folder)
        for split in job.splits:  # left by this job if it was killed here; other files have raised an error before
            remove_dataset(job.prefix(split))
    total = sum(part.num_bytes for part in parts)
    with contextlib.ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        builders = {
            split: stack.enter_context(IndexedDatasetBuilder(job.prefix(split), dtype, scratch=folder))
            for split in job.splits
        }
        text_bytes = dict.fromkeys(builders, 0)
        done = 0
        for number, part in enumerate(parts):
            for split, builder in builders.items():
                text_bytes[split] += append_part(builder, encoding, number, part, split)
            done += part.num_bytes
            progress("join", done, total)
        _check_not_empty(job, builders)
        ends = turn_ends(training_parts(encoding, len(parts)), tokenizer) if job.chat else ()
        if job.tokenizer is None:
            tokenizer.save(job.tokenizer_path)
        sidecars = {
            split: builder.finalize(
                tokenizer=os.path.relpath(job.tokenizer_path, job.out.parent),
                tokenizer_sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
                text_bytes=text_bytes[split],
                num_skipped_files=job.sources.num_skipped,
                sources=job.sources.records(held_out=split == "valid"),
                job=job.fingerprint,
                conversations=job.chat is not None,
                chat=None if job.chat is None else job.chat.origin(ends),
            )
            for split, builder in builders.items()
        }
    return _summary(job, sidecars["train"], sidecars.get("valid"), was_done=False)


def _check_not_empty(job: _Job, builders: Mapping[Split, IndexedDatasetBuilder]) -> None:
    num_documents = sum(builder.num_documents for builder in builders.values())
    if not any(builder.num_tokens for builder in builders.values()):
        raise DataError(f"the inputs must contain text; there is none in {counted(num_documents, 'document')}")
    for split, builder in builders.items():
        if not builder.num_tokens:
            name = "training" if split == "train" else "validation"
            raise DataError(
                f"no text is left for the {name} set: --valid holds out whole documents, and the inputs have "
                f"{num_documents:,}; use another fraction, or prepare the held-out text separately with the tokenizer "
                "of the training text"
            )


def _summary(job: _Job, train: Sidecar, valid: Sidecar | None, *, was_done: bool) -> PrepareSummary:
    valid_prefix = None if valid is None else job.valid_out
    return PrepareSummary(job.out, valid_prefix, train, valid, job.tokenizer_path, job.sources, was_done)


@contextlib.contextmanager
def _lock(folder: Path, out: Path) -> Iterator[None]:
    """Holds a lock, so that only one job at a time writes ``out``."""
    try:
        lock = RunLock(folder)
    except StorageError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise StorageError(f"another process is preparing {out}; wait for it, or choose another --out") from error
        raise
    with lock:
        yield
