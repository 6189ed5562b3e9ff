"""Finds everything that can be wrong with a run before its process group starts, and reports it all at once."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megalith import optional
from megalith.checkpoint.folders import find_checkpoint, step_name
from megalith.config import RunConfig, TransformerConfig, batch_size_stages, load_run, read_tree
from megalith.config.dotted import look_up
from megalith.config.yaml_text import write_override
from megalith.errors import CheckpointError, ConfigError, MegalithError, MissingDependencyError
from megalith.observe.trackers import packages
from megalith.parallel.pipeline.schedules import build_schedule
from megalith.parallel.pipeline.validate import validate
from megalith.recipe_files import recipe_names
from megalith.storage import MANIFEST, child, explained, open_store
from megalith.training.compiling import missing_compiler, with_compiling_decided
from megalith.training.continuity import changed
from megalith.training.data_checks import (
    check_beginnings,
    check_chat_templates,
    check_datasets,
    check_origin_tokenizer,
    check_token_ids,
    check_vocabulary,
    say,
    train_datasets,
    with_vocabulary,
)
from megalith.training.kept import read_config, run_of
from megalith.training.process_group import choose_device
from megalith.training.run_tokenizer import load_tokenizer
from megalith.training.tasks.prompts import encode_prompts
from megalith.training.tasks.weights import described_at

__all__ = ["preflight", "resolve_run_folder"]

_STEPS, _DECAY_STEPS = "train.steps", "optim.decay_steps"


def resolve_run_folder(source: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Resolves a run's folder to its config.yaml plus an override that continues the run in that folder.

    A config.yaml written by a run also refers to the run in the folder where that file is now, and its learning rate
    goes on decaying until the last step if it did and ``train.steps`` is overridden. Any other source is returned
    unchanged.

    Raises:
        ConfigError: the source is a folder without a run.
    """
    settings = Path(source)
    if source in recipe_names():
        return source, list(overrides)
    if os.path.isdir(source):  # False for names that no file system accepts, where Path raises
        settings = settings / "config.yaml"
        if not settings.is_file():
            raise ConfigError(
                f"{source} is a folder without a config.yaml, so there is no run to continue; give a run's "
                f"folder, a YAML file, or one of the recipes {', '.join(recipe_names())}"
            )
    if settings.name == "config.yaml" and (settings.parent / "about.json").is_file():
        # first, so that the user's run=... can still override it
        here = write_override("run", os.path.abspath(settings.parent))
        return str(settings), [here, *_with_the_last_step(settings, overrides), *overrides]
    return str(settings) if os.path.isdir(source) else source, list(overrides)


def _with_the_last_step(settings: Path, overrides: Sequence[str]) -> list[str]:
    """Returns an override for a decay to other ``train.steps``; ``settings`` has a resolved number of decay steps."""
    names = {override.partition("=")[0] for override in overrides}
    if _STEPS not in names or _DECAY_STEPS in names:
        return []
    with suppress(ConfigError):  # raised again when the settings are loaded
        tree = read_tree(settings)
        if look_up(tree, _DECAY_STEPS) == look_up(tree, _STEPS) is not None:
            return [write_override(_DECAY_STEPS, None)]
    return []


def preflight(source: str | Mapping[str, Any], overrides: Sequence[str], world_size: int) -> RunConfig:
    """Returns the resolved settings of a run that can start: every rule holds, and all its inputs are there.

    Raises:
        ConfigError: with every violation and how to fix each.
    """
    config = load_run(source, overrides, world_size=world_size)
    checks = (
        check_datasets,
        check_vocabulary,
        check_token_ids,
        check_beginnings,
        check_chat_templates,
        _check_folders,
        _check_load,
        _check_compiler,
        _check_trackers,
        _check_prompts,
        partial(_check_schedule, world_size=world_size),
    )
    # two checks may report the same file
    problems = list(dict.fromkeys(problem for check in checks for problem in _problems(check, config)))
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "this run cannot start:\n  " + "\n  ".join(problems))
    return with_compiling_decided(with_vocabulary(config), world_size)


def _problems(check: Callable[[RunConfig], Iterator[str]], config: RunConfig) -> list[str]:
    found: list[str] = []
    try:
        found.extend(check(config))
    except MegalithError as error:
        found.append(str(error))
    return found


def _check_folders(config: RunConfig) -> Iterator[str]:
    """Checks that the run's folder is not a file, and that resume=never does not mix a new run with an existing one."""
    folder = Path(config.run)
    with explained("read", folder):  # such as a name that is too long, or a link to itself
        is_file = folder.exists() and not folder.is_dir()
    if is_file:
        yield f"run ({folder}) is a file; choose another folder with run=..."
    elif config.resume == "never" and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        yield f"{folder} already holds a run and resume=never would mix the two; choose another run=..., or resume=auto"


def _check_load(config: RunConfig) -> Iterator[str]:
    """Checks that what the run loads exists and has the tokenizer that made the training data."""
    folder = Path(config.run)
    with explained("read", folder):  # such as a name that is too long
        goes_on = config.resume == "auto" and any(folder.glob("checkpoints/step-*"))
    if goes_on:  # nothing is loaded, but an imported run starts from the checkpoint that it holds
        imported = find_checkpoint(folder / "checkpoints", warn=False)  # resume_or_load warns
        if imported is not None and imported.name == step_name(0):
            yield from check_origin_tokenizer(config, open_store(folder))
        return
    if config.load is None:
        return
    store = open_store(config.load)
    described = described_at(store)
    if described is not None:
        _say_what_differs(described, config, store / "config.json")
        keeper = store
    elif MANIFEST in store.names():
        keeper = run_of(store)
        with suppress(CheckpointError):  # weights alone are enough to load
            _say_what_differs(read_config(keeper).model, config, keeper / "config.yaml")
    else:
        newest = find_checkpoint(child(config.load, "checkpoints"))
        way_out = f"load={newest}" if newest else "a folder such as RUN/checkpoints/step-00000100"
        yield f"load ({config.load}) is neither a complete checkpoint nor a Hugging Face model; give {way_out}"
        return
    yield from check_origin_tokenizer(config, keeper)


def _say_what_differs(described: TransformerConfig, config: RunConfig, where: object) -> None:
    """Logs the settings of the model that differ from those of ``described``, the one whose weights are loaded."""
    # neither changes what is computed with loaded weights
    models = (model.model_dump(exclude={"preset", "init_method_std"}) for model in (described, config.model))
    if told := changed(*models):
        say(f"the model differs from that of {where}: {', '.join(told)}")


def _check_compiler(config: RunConfig) -> Iterator[str]:
    """Checks for a C++ compiler, which torch.compile needs on CPUs."""
    if choose_device().type != "cpu" or (compiler := missing_compiler()) is None:
        return
    wanted = {"train.compile": config.train.compile, "train.compile_fusions": config.train.compile_fusions}
    for setting in (setting for setting, is_wanted in wanted.items() if is_wanted):
        yield f"{setting}=true needs a C++ compiler on a CPU, but {compiler} was not found; install it, or set CXX"


def _check_trackers(config: RunConfig) -> Iterator[str]:
    """Checks that the packages of the requested dashboards are installed."""
    for package in packages(config.tracking):
        if not optional.has(package):
            try:
                optional.need(package)
            except MissingDependencyError as error:
                yield f"tracking ({', '.join(config.tracking or ())}): {error}"


def _check_prompts(config: RunConfig) -> Iterator[str]:
    """Checks that there is a tokenizer for the prompts of train.generation, and that they fit into the model."""
    if config.train.generation is None or not train_datasets(config):
        return
    try:
        encode_prompts(config, load_tokenizer(config))
    except MegalithError as error:
        yield f"train.generation: {error}"


def _check_schedule(config: RunConfig, world_size: int) -> Iterator[str]:
    """Checks, for every batch size of the run, that each pipeline rank receives what it waits for."""
    parallel, train = config.parallel, config.train
    if parallel.pipeline > 1:
        unit = train.micro_batch_size * parallel.layout(world_size).data_parallel
        for stage in batch_size_stages(train, config.data.seq_length):
            num_microbatches = stage.global_batch_size // unit
            validate(build_schedule(parallel.schedule, parallel.pipeline, num_microbatches, parallel.virtual))
    yield from ()
