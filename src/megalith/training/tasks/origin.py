"""What is taken from a trained model: its architecture, and where its weights are; or the names of its classes."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config import BertConfig, RunConfig, TransformerConfig, read_tree
from megalith.config.settings_group import given_fields
from megalith.errors import ConfigError
from megalith.models.foreign import foreign_model
from megalith.recipe_files import recipe_names
from megalith.storage import LocalStore, open_store
from megalith.training.kept import recorded_settings
from megalith.training.run_folder import open_run
from megalith.training.state import read_class_names
from megalith.training.tasks.tokens_of_origin import goes_on

__all__ = ["check_origin", "classes_at", "settings_from", "usual_settings"]

log = logging.getLogger(__name__)

# settings of model.bert that describe the head
_OF_POOLERS = ("classifier_pooling", "classifier_activation")
_OF_EMBEDDINGS = ("embedding_pooling", "embedding_size", "normalize_embeddings")
_OF_NO_WEIGHTS = ("head", "binary_head", "num_classes", "classifier_dropout", "similarity_temperature")
_OF_HEADS = (*_OF_NO_WEIGHTS, *_OF_POOLERS, *_OF_EMBEDDINGS)


def classes_at(location: str) -> tuple[str, ...]:
    """Returns the class names of the model at ``location``, as in ``settings_from``; empty if it has none.

    Raises CheckpointError and ConfigError as ``settings_from`` does.
    """
    store = open_store(location)
    folder = foreign_model(store)
    return read_class_names(open_run(store, or_foreign=True)[0]) if folder is None else folder.class_names


def settings_from(location: str, source: str | Path | None) -> dict[str, Any]:
    """Returns settings for ``load_run``: those of ``source``, with the model at ``location``, whose weights it loads.

    If ``source`` names the head of an encoder (``model.bert.head``), it replaces the model's own, and
    ``model.init_method_std`` of ``source`` is the size of its initial weights. But if the model has a pooler, it keeps
    the pooling and activation it was trained with, and if it embeds texts, how; a warning says so if ``source`` has
    others. Its similarity temperature is kept unless ``source`` has another. Overrides of the result still change them.

    Args:
        location: a Hugging Face model folder, a run's folder, or a checkpoint of Megalith or Megatron-Core.
        source: as in ``load_run``; None for the ``usual_settings``.

    Raises:
        CheckpointError: ``location`` holds no model, or a damaged one.
        ConfigError: our model cannot represent it, or ``source`` cannot be read, such as a folder.
    """
    if source is not None and os.path.isdir(source) and source not in recipe_names():
        raise ConfigError(
            f"{source} is a folder, and --from takes a recipe or a YAML file beside it; leave --from out to continue "
            "the run in that folder, or give a new run its folder with run=..."
        )
    store = open_store(location)
    if (folder := foreign_model(store)) is not None:
        model, load = folder.config, store
        usual = usual_settings(model, folder.num_positions, folder.weights.dtype)
        for note in folder.notes if os.environ.get("RANK", "0") == "0" else ():
            log.info(note)
    else:
        load, _, run = open_run(store, or_foreign=True)
        model = run.model
        usual = usual_settings(model, run.data.seq_length, run.precision.dtype)
    if source is None:
        return {**usual, "load": str(load)}
    settings = read_tree(source)
    return {**settings, "model": _with_head(model, settings.get("model"), location), "load": str(load)}


def check_origin(config: RunConfig, location: str) -> None:
    """Checks that a run that goes on was started from the model at ``location``, which it does not load again.

    A run matches whichever of its checkpoints was loaded. If the run's config.yaml cannot be read, nothing is checked.

    Raises:
        ConfigError: it was started from another model, or from scratch, or is itself at ``location``.
    """
    if not goes_on(config):
        return
    given, folder = _real_path(location), _real_path(config.run)
    if folder in (given, _folder_of_run(given)):
        raise ConfigError(
            f"--from {location} is the run in {config.run} itself; leave --from out to continue that run, or start "
            "another one from it in a new folder with run=..."
        )
    settings = recorded_settings(Path(config.run))
    if not isinstance(settings, Mapping):
        return
    load = settings.get("load")
    if isinstance(load, str) and given in (_real_path(load), _folder_of_run(_real_path(load))):
        return
    start = f"from {load}" if load else "without --from"
    raise ConfigError(
        f"{config.run} already has a run that was started {start}, and not from {location}; give the new run another "
        "folder with run=..., or leave --from out to continue the existing one"
    )


def _real_path(location: str) -> str:
    store = open_store(location)
    return os.path.realpath(store.path) if isinstance(store, LocalStore) else str(store)


def _folder_of_run(checkpoint: str) -> str | None:
    """Returns RUN of RUN/checkpoints/step-..., which need not exist any more; None for any other path."""
    checkpoints = os.path.dirname(checkpoint)
    return os.path.dirname(checkpoints) if os.path.basename(checkpoints) == "checkpoints" else None


def _with_head(model: TransformerConfig, wanted: Any, location: str) -> TransformerConfig | dict[str, Any]:
    """Returns ``model`` with the head that the model settings ``wanted`` name; unchanged if they name none."""
    group = wanted.get("bert") if isinstance(wanted, Mapping) else None
    if model.bert is None or not isinstance(group, Mapping) or group.get("head") is None:
        return model
    trunk = {name: value for name, value in given_fields(model.bert).items() if name not in _OF_HEADS}
    head = {name: value for name, value in group.items() if name in _OF_HEADS}
    kept = _trained_with(model.bert, head["head"])
    for name, value in kept.items():
        if head.get(name, value) != value and os.environ.get("RANK", "0") == "0":
            log.warning(
                "model.bert.%s is %s, with which the %s of %s was trained; to change it, set it on the command line",
                name,
                value,
                "head" if model.bert.head == "embedding" else "pooler",
                location,
            )
    head |= kept
    if model.bert.head == head["head"] == "embedding" and "similarity_temperature" in given_fields(model.bert):
        head.setdefault("similarity_temperature", model.bert.similarity_temperature)  # suits its similarities
    std = {"init_method_std": wanted["init_method_std"]} if "init_method_std" in wanted else {}
    return {**given_fields(model), **std, "bert": {**trunk, **head}}


def _trained_with(bert: BertConfig, wanted_head: Any) -> dict[str, Any]:
    """Returns the settings of the head of ``bert`` that its weights were trained with and that ``wanted_head`` has."""
    if bert.num_text_scores and wanted_head != "pretraining":  # the model has a pooler
        return {name: getattr(bert, name) for name in _OF_POOLERS}
    if bert.head == wanted_head == "embedding":  # a folder that does not say how it embeds gives none of them
        return {name: value for name, value in given_fields(bert).items() if name in _OF_EMBEDDINGS}
    return {}


def usual_settings(model: TransformerConfig, seq_length: int, dtype: str) -> dict[str, Any]:
    """Returns default settings to continue training ``model``; all may be overridden, and data are not set."""
    return {
        "model": model,
        "data": {"seq_length": seq_length},
        "train": {"steps": 1000, "global_batch_size": 16, "micro_batch_size": 1},
        "optim": {"lr": 1e-5},
        "precision": {"dtype": dtype},
    }
