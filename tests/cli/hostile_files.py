"""Valid files of every kind that a command reads, the commands that read them, and ways to damage them."""

import copy
import gzip
import json
import os
import random
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from megalith.config import TransformerConfig
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.errors import MegalithError
from megalith.models import hf
from megalith.models.gpt_model import GPTModel
from tests.program import Ended, here
from tests.tiny_run import LLAMA, settings, write_dataset

_GIGABYTE = 1 << 30
_STEP = "run/checkpoints/step-00000001"


def make_sound(folder: Path) -> None:
    """One file of each kind, and a run of one step in ``run``."""
    write_dataset(folder / "text")
    train_byte_level_bpe(["some words to merge, some more words"] * 9, 270).save(folder / "tokenizer.json")
    documents = "".join(json.dumps({"text": f"document {number} of some words"}) + "\n" for number in range(30))
    (folder / "documents.jsonl").write_text(documents)
    (folder / "documents.jsonl.gz").write_bytes(gzip.compress(documents.encode(), mtime=0))
    (folder / "documents.txt").write_text(documents)
    tree = settings(folder, train={"steps": 1, "global_batch_size": 2, "micro_batch_size": 2})
    (folder / "settings.yaml").write_text(yaml.safe_dump(tree))
    assert here("train", folder / "settings.yaml").code == 0
    (folder / "hf").mkdir()
    config = TransformerConfig(**LLAMA)
    described = hf.LLAMA.config_to_hf(config, max_position_embeddings=16, dtype="float32", eos_token_id=None)
    (folder / "hf/config.json").write_text(json.dumps(described))
    with torch.random.fork_rng():
        state = {name: tensor.detach() for name, tensor in GPTModel(config).state_dict().items()}
    save_file(hf.LLAMA.to_hf(state, config), folder / "hf/model.safetensors")


def copy_of(sound: Path, folder: Path) -> Path:
    """A copy of ``sound`` at ``folder``, with settings that refer to the copy."""
    shutil.copytree(sound, folder)
    for file in ("settings.yaml", "run/config.yaml"):
        (folder / file).write_text((folder / file).read_text().replace(str(sound), str(folder)))
    return folder


def _plan(folder: Path) -> Ended:
    """For settings and sidecars, which may be valid but request a run of years."""
    return here("train", folder / "settings.yaml", "--dry-run")


def _train(folder: Path, *overrides: str) -> Ended:
    return here("train", folder / "settings.yaml", f"run={folder / 'new'}", *overrides)


def _prepare(folder: Path, documents: str, *arguments: object) -> Ended:
    how = arguments or ("--vocab-size", 300)
    return here("data", "prepare", folder / documents, "--out", folder / "made", "--processes", 1, *how)


def _evaluate(folder: Path) -> Ended:
    return here("eval", folder / _STEP, "--data", folder / "text")


def _report(folder: Path) -> Ended:
    return here("report", folder / "run")


def _read_folder(folder: Path) -> Ended:
    try:
        hf.read_folder(folder / "hf")
    except MegalithError as error:
        return Ended(2, "", f"error: {error}\n")
    return Ended(0, "", "")


@dataclass(frozen=True)
class Reader:
    """How ``file`` is read; ``survives`` names the damages that leave something valid."""

    file: str
    read: Callable[[Path], Ended]
    survives: frozenset[str] = field(default=frozenset())


# a report treats a missing file the same way
NO_FILE = {
    *("a folder", "a FIFO", "a socket", "a link to itself", "a link to nothing"),
    *("a link to /dev/zero", "a link to /dev/full"),
}

READERS = {
    "settings": Reader("settings.yaml", _plan, frozenset({"last byte missing"})),
    "index": Reader("text.idx", _train),
    "tokens": Reader("text.bin", _plan, frozenset({"zeros", "random bytes"})),
    "sidecar": Reader("text.json", _plan, frozenset({"last byte missing", "a link to nothing"})),
    "tokenizer of a run": Reader(
        "tokenizer.json", lambda f: _train(f, f"data.tokenizer={f / 'tokenizer.json'}", "model.vocab_size=270")
    ),
    "tokenizer of data": Reader(
        "tokenizer.json", lambda f: _prepare(f, "documents.txt", "--tokenizer", f / "tokenizer.json")
    ),
    "settings of a run": Reader("run/config.yaml", _evaluate, frozenset({"last byte missing"})),
    "metrics": Reader("run/metrics.jsonl", _report, frozenset({"last byte missing"})),
    "about": Reader("run/about.json", _report, frozenset({"last byte missing", *NO_FILE})),
    "manifest": Reader(f"{_STEP}/manifest.json", _evaluate, frozenset({"last byte missing"})),
    "index of tensors": Reader(f"{_STEP}/index.json", _evaluate),
    "shard": Reader(f"{_STEP}/shard-00000-of-00001.safetensors", _evaluate),
    "lines": Reader("documents.jsonl", lambda f: _prepare(f, "documents.jsonl"), frozenset({"last byte missing"})),
    "compressed lines": Reader("documents.jsonl.gz", lambda f: _prepare(f, "documents.jsonl.gz")),
    "text": Reader(
        "documents.txt",
        lambda f: _prepare(f, "documents.txt"),
        frozenset({"last byte missing", "cut in half", "one byte", "zeros", "the magic of zip"}),
    ),
    "config of Hugging Face": Reader("hf/config.json", _read_folder),
    "weights of Hugging Face": Reader("hf/model.safetensors", _read_folder),
}


def _cut(size_of: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size_of(path.stat().st_size))


def _content(content_of: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content_of(path.read_bytes())) and None


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Removes the file and creates something else under its name."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:  # through the folder's descriptor, because socket names must be short
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _cut(lambda _: 0),
    "one byte": _cut(lambda _: 1),
    "cut in half": _cut(lambda size: size // 2),
    "last byte missing": _cut(lambda size: size - 1),
    "3 GB": _cut(lambda _: 3 * _GIGABYTE),  # sparse: takes no disk space
    "zeros": _content(lambda content: bytes(len(content))),
    "random bytes": _content(lambda content: random.Random(0).randbytes(len(content))),
    "not UTF-8": _content(lambda content: b"\xff\xfe" + content),
    "the magic of zip": _content(lambda content: b"PK\x03\x04" + content),
    "a pickle": _content(lambda _: b"\x80\x04cos\nsystem\n(S'exit 3'\ntR."),
    "deep nesting": _content(lambda _: b"[" * 100_000 + b"]" * 100_000),
    "deep objects": _content(lambda _: b'{"a":' * 50_000),
    "5,000 digits": _content(lambda _: b'{"a": ' + b"9" * 5000 + b"}"),
    "a folder": _instead(Path.mkdir),
    "a FIFO": _instead(os.mkfifo),
    "a socket": _instead(_make_socket),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nothing")),
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to /dev/full": _instead(lambda path: path.symlink_to("/dev/full")),
}

# replacements for a leaf or branch of JSON and YAML; numbers at the limits of processors and Python
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 1.5, 1e308, float("inf"), float("nan")),
    *("", "x", "\0", "\ud800", "../../etc/passwd", "/dev/zero", "x" * 300),
    *([], {}, [[]], [None], {"a": 1}, {"": {}}, [1] * 1000),
)


def flip_a_bit(path: Path, seed: int) -> None:
    """Flips one bit of the file, more often in the header."""
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    place = draw.randrange(min(len(content), draw.choice((32, 256, len(content)))))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def mutate(path: Path, seed: int) -> None:
    """Puts other values or names, or nothing, in one to three places of a JSON or YAML file."""
    is_yaml, draw = path.suffix == ".yaml", random.Random(seed)
    tree = (yaml.safe_load if is_yaml else json.loads)(path.read_text())
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        branch, key = draw.choice(places)
        value = copy.deepcopy(draw.choice(VALUES))
        change = draw.random()
        if change < 0.7:
            branch[key] = value
        elif change < 0.85:
            del branch[key]
        elif isinstance(branch, dict):
            branch[draw.choice(("", "x", "\0", str(key) * 2))] = value
    path.write_text(yaml.safe_dump(tree) if is_yaml else json.dumps(tree), errors="surrogatepass")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every branch with each of its keys; for a long list or table, the first few."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    for key in keys[:40]:
        yield tree, key
        yield from _places(tree[key])


class TooLate(BaseException):
    """Not an OSError like TimeoutError, which the code under test may mistake for a disk that does not answer."""


@contextmanager
def bounded(num_bytes: int = _GIGABYTE, seconds: float = 10.0) -> Iterator[None]:
    """In the context, code that takes too much memory raises MemoryError, and code that takes too long TooLate.

    Time is processor time, because others may keep this machine busy; code that only waits has six times as long.
    """

    def too_late(signal_number: int, frame: object) -> None:
        raise TooLate(f"no answer after {seconds} s")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 6 * seconds)}
    usual_limit = resource.getrlimit(resource.RLIMIT_AS)
    usual_handlers = {number: signal.signal(number, too_late) for number in timers}
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, usual_limit[1]))
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in usual_handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, usual_limit)
