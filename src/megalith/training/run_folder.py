"""What a run keeps in its folder beside metrics and checkpoints, so that the folder can be used from elsewhere.

config.yaml        the resolved settings, every path absolute
about.json         the size of the model, its dtype, which token ends a document, the machine
tokenizer.json     the tokenizer of the training data, if it is known

With these, text is generated and data are evaluated wherever the folder is, whatever became of the training data.
"""

import json
import os
from pathlib import Path

from megalith.config import RunConfig, dump_yaml, load_run
from megalith.config.yaml_text import read_yaml
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, DataError, MissingFileError
from megalith.observe.machine import describe_machine
from megalith.storage import LocalStore, Store
from megalith.storage.atomic import write_json_atomic, write_text_atomic
from megalith.training.preflight import KEPT_TOKENIZER, load_tokenizer
from megalith.training.run import Run

__all__ = ["find_tokenizer", "kept_tokenizer", "read_config", "write_run_files"]

_EOD = "end_of_document"  # in about.json


def write_run_files(run: Run) -> None:
    """Writes the files above, on one rank, when ``run`` has been resumed or is new. Raises StorageError."""
    write_text_atomic(run.folder / "config.yaml", dump_yaml(_with_absolute_paths(run.config)))
    about = {"parameters": sum(chunk.num_parameters() for chunk in run.chunks), "dtype": run.config.precision.dtype}
    tokenizer = _training_tokenizer(run)
    if tokenizer is None:
        (run.folder / KEPT_TOKENIZER).unlink(missing_ok=True)
    else:
        tokenizer.save(run.folder / KEPT_TOKENIZER)
        about[_EOD] = tokenizer.eod
    write_json_atomic(run.folder / "about.json", about | describe_machine())


def read_config(folder: Store) -> RunConfig:
    """The settings of the run in ``folder``. Raises CheckpointError if they are not there."""
    if "config.yaml" not in folder.names():
        raise CheckpointError(
            f"{folder}/config.yaml is missing, which says what model its checkpoints hold; keep it with them"
        )
    return load_run(read_yaml(folder.read("config.yaml").decode(), f"{folder}/config.yaml"))


def kept_tokenizer(folder: Store) -> Tokenizer | None:
    """The tokenizer that the run in ``folder`` keeps; None if it keeps none. Raises DataError if it is damaged."""
    try:
        content = folder.read(KEPT_TOKENIZER)
    except MissingFileError:
        return None
    return Tokenizer(content, _kept_eod(folder), f"{folder}/{KEPT_TOKENIZER}")


def find_tokenizer(
    folder: Store, config: RunConfig, given: str | Path | None = None, eod: str | int | None = None
) -> Tokenizer:
    """The tokenizer of the run in ``folder``: ``given``, the one that it keeps, or the one that its data name.

    Args:
        given: path of a tokenizer.json.
        eod: the token of ``given`` that ends a document, as in ``Tokenizer``.

    Raises:
        DataError: none of them can be read, or ``given`` is another tokenizer than the one that is kept.
    """
    kept = kept_tokenizer(folder)
    if given is not None:
        tokenizer = Tokenizer.load(given, _kept_eod(folder) if eod is None else eod)
        if kept is not None and kept.sha256 != tokenizer.sha256:
            raise DataError(
                f"{given} is not the tokenizer that {folder} was trained with, which it keeps as {KEPT_TOKENIZER}; "
                "leave --tokenizer out"
            )
        return tokenizer
    if kept is not None:
        return kept
    try:
        return load_tokenizer(config)
    except DataError as error:
        raise DataError(f"{folder} keeps no {KEPT_TOKENIZER}, and {error}; or give --tokenizer PATH") from error


def _training_tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer of the training data; None where nothing tells which it is."""
    if run.config.data.train is None:
        return None
    try:
        return load_tokenizer(run.config)
    except DataError:
        # data without their tokenizer, in a run that goes on: what it kept at its start is still right
        return kept_tokenizer(LocalStore(run.folder)) if run.state.step else None


def _kept_eod(folder: Store) -> int | None:
    try:
        about = json.loads(folder.read("about.json"))
    except (MissingFileError, ValueError):
        return None
    found = about.get(_EOD) if isinstance(about, dict) else None
    return found if isinstance(found, int) else None


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """``config`` as it reads from any working folder."""
    data = {name: _absolute(getattr(config.data, name)) for name in ("train", "valid", "tokenizer")}
    update = {"data": config.data.model_copy(update=data), "load": _absolute(config.load), "run": _absolute(config.run)}
    return config.model_copy(update=update)


def _absolute(location: str | None) -> str | None:
    return location if location is None or "://" in location else os.path.abspath(location)
