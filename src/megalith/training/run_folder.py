"""What a run keeps in its folder so that the folder can be used from elsewhere, even without the training data.

config.yaml        the resolved settings, every path absolute
tokenizer.json     the tokenizer of the training data, byte for byte, if it is known
huggingface/       the files next to the tokenizer in the Hugging Face folder that the model comes from, with the chat
                   template of the training data; without a tokenizer only generation_config.json, which names the
                   tokens that end a text
eod.json           {"id", "begin", "ends"}: tokens that end a document, begin a text, and end a text
"""

import logging
from pathlib import Path

from megalith.config import RunConfig, dump_yaml
from megalith.data.chat.format import companions_with_templates
from megalith.data.sidecar import ChatOrigin
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.storage import LocalStore, Store, open_store
from megalith.storage.atomic import write_text_atomic
from megalith.training.continuity import with_absolute_paths
from megalith.training.data_checks import train_datasets
from megalith.training.kept import (
    KEPT_TOKENIZER,
    keep,
    kept_marks,
    kept_tokenizer,
    newest_checkpoint,
    read_config,
    recorded_settings,
    run_of,
)
from megalith.training.run import Run
from megalith.training.run_tokenizer import chats_of_data, load_tokenizer
from megalith.training.tasks.tokens_of_origin import companions_of_origin, goes_on

__all__ = ["find_tokenizer", "keep_settings", "keep_tokenizer", "open_run"]

log = logging.getLogger(__name__)


def keep_settings(run: Run) -> None:
    """Writes config.yaml; a run that goes on keeps its ``load``. Called on one rank. Raises StorageError."""
    config = with_absolute_paths(run.config)
    if goes_on(config):
        match recorded_settings(run.folder):
            case {"load": str(load)}:
                config = config.model_copy(update={"load": load})
            case {}:
                config = config.model_copy(update={"load": None})
    write_text_atomic(run.folder / "config.yaml", dump_yaml(config))


def keep_tokenizer(run: Run) -> None:
    """Writes the tokenizer of ``run``, whether new or resumed. Called on one rank. Raises StorageError."""
    tokenizer = _training_tokenizer(run)
    companions = companions_of_origin(run.config, tokenizer)
    if tokenizer is not None and (chat := _training_chat(run.config)) is not None:
        companions = companions_with_templates(companions, chat)
    keep(run.folder, tokenizer, companions)


def open_run(source: str | Path | Store, *, or_foreign: bool = False) -> tuple[Store, Store, RunConfig]:
    """Returns the checkpoint, the folder and the settings of a run; ``source`` is a run or one of its checkpoints.

    Raises CheckpointError as ``newest_checkpoint``, which takes ``or_foreign``, and ``read_config`` do.
    """
    checkpoint = newest_checkpoint(open_store(source), or_foreign=or_foreign)
    folder = run_of(checkpoint)
    return checkpoint, folder, read_config(folder)


def find_tokenizer(
    folder: Store, config: RunConfig, given: str | Path | None = None, eod: str | int | None = None
) -> Tokenizer:
    """Returns the tokenizer of the run in ``folder``: ``given``, the one it keeps, or the one its data name.

    Args:
        given: path of a tokenizer.json.
        eod: the token of ``given`` that ends a document, as in ``Tokenizer``.

    Raises:
        DataError: none of them can be read, or ``given`` differs from the tokenizer that the run keeps.
    """
    kept = kept_tokenizer(folder)
    if given is not None:
        marks = kept_marks(folder)
        tokenizer = (marks if eod is None else marks._replace(eod=eod)).load(given)
        if kept is not None and kept.sha256 != tokenizer.sha256:
            raise DataError(
                f"{given} is not the tokenizer that {folder} was trained with and keeps as {KEPT_TOKENIZER}; "
                "leave --tokenizer out"
            )
        return tokenizer
    if kept is not None:
        return kept
    try:
        return load_tokenizer(config)
    except DataError as error:
        raise DataError(f"{folder} has no {KEPT_TOKENIZER}, and {error}; or give --tokenizer PATH") from error


def _training_chat(config: RunConfig) -> ChatOrigin | None:
    """Returns the first chat template of the training data; None if they have none, or are gone from a resumed run."""
    try:
        chats = chats_of_data(config).values()
    except DataError:
        return None
    return next((chat for chat in chats if chat.template is not None), None)


def _training_tokenizer(run: Run) -> Tokenizer | None:
    """Returns the tokenizer of the training data, or None if it is unknown."""
    if run.config.data.train is None:
        return None
    try:
        return load_tokenizer(run.config)
    except DataError as error:
        if goes_on(run.config):  # what it kept at its start is still right
            return kept_tokenizer(LocalStore(run.folder))
        if any(data.sidecar is not None and data.sidecar.tokenizer is not None for data in train_datasets(run.config)):
            log.warning("%s; the run keeps neither the tokenizer of its data nor their chat template", error)
        return None
