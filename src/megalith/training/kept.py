"""Finds what a run has kept in its folder, from the folder or from one of its checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megalith.checkpoint.folders import find_checkpoint
from megalith.config import RunConfig, load_run
from megalith.config.yaml_text import MOST_BYTES, read_yaml
from megalith.data.companions import read_companions, token_ids
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError, DataError, MissingFileError
from megalith.storage import MANIFEST, LocalStore, Store, explained, write_json_atomic
from megalith.training.tasks.weights import described_at

__all__ = [
    "EOD_FILE",
    "KEPT_TOKENIZER",
    "Marks",
    "keep",
    "kept_companions",
    "kept_marks",
    "kept_tokenizer",
    "newest_checkpoint",
    "read_config",
    "recorded_settings",
    "run_of",
]

KEPT_TOKENIZER = "tokenizer.json"
EOD_FILE = "eod.json"
_COMPANIONS = "huggingface"


class Marks(NamedTuple):
    """What tokenizer.json does not specify: ids of the tokens that end a document, begin a text, and end a text."""

    eod: int | str | None = None
    begin: tuple[int, ...] | None = None
    ends: tuple[int, ...] = ()

    def load(self, path: str | Path) -> Tokenizer:
        """Loads the tokenizer in the file ``path`` with these marks. Raises DataError."""
        tokenizer = Tokenizer.load(path, self.eod, ends=self.ends)
        return tokenizer if self.begin is None else tokenizer.framed(begin=self.begin)


def newest_checkpoint(source: Store, *, or_foreign: bool = False) -> Store:
    """Returns ``source`` if it is a checkpoint, else the newest complete one of the run.

    Args:
        or_foreign: the caller also accepts a ``foreign_model``, and has found none; errors say so.

    Raises:
        CheckpointError: ``source`` does not exist, or is neither of them.
        ConfigError: it is a foreign model that our model cannot represent.
    """
    if MANIFEST in source.names():
        return source
    found = find_checkpoint(source / "checkpoints")
    if found is not None:
        return found
    if isinstance(source, LocalStore) and not source.path.exists():
        others = ", or a Hugging Face or Megatron folder" if or_foreign else ""
        raise CheckpointError(f"{source} does not exist; give the folder of a run or of one of its checkpoints{others}")
    if not or_foreign and described_at(source) is not None:
        raise CheckpointError(
            f"{source} is a model of Hugging Face or Megatron, and must be a run or a checkpoint here; make it a run "
            f"with megalith convert import {source} --out RUN, and give that"
        )
    others = ", nor a Hugging Face or Megatron folder" if or_foreign else ""
    raise CheckpointError(
        f"{source} is neither a run with a complete checkpoint nor a checkpoint{others}; give one of them"
    )


def run_of(checkpoint: Store) -> Store:
    """Returns the folder of the run that wrote ``checkpoint`` (RUN/checkpoints/step-...), also through a symlink."""
    run = checkpoint.split()[0].split()[0]
    if "config.yaml" not in run.names() and isinstance(checkpoint, LocalStore):
        resolved = checkpoint.path.resolve()
        return run if resolved == checkpoint.path else run_of(LocalStore(resolved))
    return run


def read_config(folder: Store) -> RunConfig:
    """Returns the settings of the run in ``folder``. Raises CheckpointError if they are missing or damaged."""
    path = folder / "config.yaml"
    if "config.yaml" not in folder.names():
        raise CheckpointError(
            f"{path} is missing; it describes the model in the checkpoints and must be kept with them"
        )
    try:
        content = folder.read("config.yaml", 0, min(folder.size("config.yaml"), MOST_BYTES + 1))
        settings = read_yaml(content, str(path))
        if not isinstance(settings, dict):
            raise ConfigError(f"it must contain groups of settings (model:, data:, train:, ...); got {settings!r:.80}")
        return load_run(settings)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} does not describe the model in the checkpoints: {error}; restore it from a backup"
        ) from error


def recorded_settings(folder: Path) -> Any:
    """Returns the unchecked settings in the config.yaml of the run in ``folder``; None if they cannot be read."""
    path = folder / "config.yaml"
    try:
        with path.open("rb") as file:
            return read_yaml(file.read(MOST_BYTES + 1), str(path))
    except (OSError, ConfigError):
        return None


def kept_tokenizer(folder: Store) -> Tokenizer | None:
    """Returns the tokenizer kept in ``folder``, or None if there is none. Raises DataError if it is damaged."""
    try:
        content = folder.read(KEPT_TOKENIZER)
    except MissingFileError:
        return None
    marks = kept_marks(folder)
    return Tokenizer(content, marks.eod, f"{folder}/{KEPT_TOKENIZER}", begin=marks.begin, ends=marks.ends)


def kept_marks(folder: Store) -> Marks:
    """Returns the marks kept in ``folder``; for a run without a tokenizer, the end tokens kept from its model.

    Raises DataError if they are damaged, or as ``read_companions`` does.

    Earlier versions kept only ``id``. They trained on documents without a begin token. A model that was imported and
    not trained further begins a text as its tokenizer does.
    """
    try:
        kept = json.loads(folder.read(EOD_FILE))
    except MissingFileError:
        return Marks() if KEPT_TOKENIZER in folder.names() else _marks_without_tokenizer(folder)
    except ValueError:
        kept = None
    fields = kept if isinstance(kept, dict) else {}
    eod, begin, ends = fields.get("id"), fields.get("begin", []), fields.get("ends", [])
    was_trained = "metrics.jsonl" in folder.names()
    if type(eod) is not int or not _are_ids(begin) or not _are_ids(ends):
        raise DataError(
            f'{folder / EOD_FILE} must hold {{"id": number, "begin": [numbers], "ends": [numbers]}}; restore it '
            "from a backup, or delete it to end texts at tokens with usual names and begin them as in tokenizer.json"
        )
    return Marks(eod, tuple(begin) if was_trained or "begin" in fields else None, tuple(ends))


def kept_companions(folder: Store) -> dict[str, bytes]:
    """Returns the files kept from the Hugging Face folder that the run began from. Raises as ``read_companions``."""
    return read_companions(folder / _COMPANIONS)


def keep(folder: Path, tokenizer: Tokenizer | None, companions: Mapping[str, bytes]) -> None:
    """Writes ``tokenizer``, its marks and its companion files into the run's ``folder``.

    Removes files left by an earlier run that was never saved. Raises StorageError.
    """
    if tokenizer is not None:
        marks = {"id": tokenizer.eod, "begin": tokenizer.begin, "ends": tokenizer.ends}
        write_json_atomic(folder / EOD_FILE, marks)
    beside = LocalStore(folder / _COMPANIONS)
    for name, content in companions.items():
        with explained("write", beside.path / name):
            (beside.path / name).parent.mkdir(parents=True, exist_ok=True)
        beside.put(name, content)
    with explained("remove", beside.path):
        files = [path.relative_to(beside.path).as_posix() for path in beside.path.rglob("*") if not path.is_dir()]
    for name in set(files) - companions.keys():
        beside.remove(name)
    if tokenizer is not None:
        tokenizer.save(folder / KEPT_TOKENIZER)
        return
    for name in (KEPT_TOKENIZER, EOD_FILE):
        LocalStore(folder).remove(name)


def _marks_without_tokenizer(folder: Store) -> Marks:
    ends = token_ids(kept_companions(folder)).get("eos_token_id", [])
    ends = tuple(ends) if isinstance(ends, list) else (ends,)
    return Marks(next(iter(ends), None), None, ends)


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and all(type(id) is int and 0 <= id < 2**31 for id in given)
