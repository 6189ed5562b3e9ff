"""Finds everything that can be wrong with a run before its process group starts, and reports it all at once."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megalith import optional
from megalith.checkpoint.folders import find_checkpoint, step_name
from megalith.config import RunConfig, TransformerConfig, batch_size_stages, load_run, read_tree, valid_setting
from megalith.config.dotted import look_up
from megalith.config.yaml_text import write_override
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.token_ids import check_dataset
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError, DataError, MegalithError, MissingDependencyError
from megalith.observe.trackers import packages
from megalith.parallel.pipeline.schedules import build_schedule
from megalith.parallel.pipeline.validate import validate
from megalith.recipe_files import recipe_names
from megalith.storage import MANIFEST, Store, child, explained, open_store, record_of
from megalith.training.compiling import missing_compiler, with_compiling_decided
from megalith.training.continuity import changed
from megalith.training.kept import KEPT_TOKENIZER, kept_marks, read_config, run_of
from megalith.training.process_group import choose_device
from megalith.training.tasks.prompts import encode_prompts
from megalith.training.tasks.tokens_of_origin import ends_of_origin
from megalith.training.tasks.weights import described_at

__all__ = ["load_tokenizer", "preflight", "resolve_run_folder"]

log = logging.getLogger(__name__)

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
        _check_datasets,
        _check_vocabulary,
        _check_token_ids,
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
    return with_compiling_decided(_with_vocabulary(config), world_size)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """Returns the tokenizer of a run: ``data.tokenizer``, or the one named beside its training data.

    If the latter can no longer be read, the run's own copy is used. Texts begin as the documents of the training data
    do: with or without the tokens that the tokenizer puts in front of a text. They end as in the model that the run
    starts from, if that model has the same tokenizer.

    Raises:
        DataError: neither names a tokenizer, or it cannot be read.
    """
    if config.data.train is None:
        raise DataError("the run has no data.train from which to load its tokenizer; set data.train in its config.yaml")
    train = IndexedDataset(config.data.train)
    tokenizer = _tokenizer_of(config, train)
    begin = tokenizer.begin if tokenizer.begins(train.tokens[: len(tokenizer.begin)].tolist()) else ()
    return tokenizer.framed(begin=begin, ends=ends_of_origin(config, tokenizer))


def _tokenizer_of(config: RunConfig, train: IndexedDataset) -> Tokenizer:
    """``load_tokenizer`` without adapting how texts begin and end."""
    sidecar = train.sidecar
    eod = None if sidecar is None else sidecar.eod  # a tokenizer may end documents with an unusual token
    kept = Path(config.run) / KEPT_TOKENIZER
    if config.data.tokenizer is not None:
        try:
            return Tokenizer.load(config.data.tokenizer, eod)
        except DataError as error:
            if not kept.exists():
                raise
            raise DataError(f"{error}; or use the copy in the run's folder: data.tokenizer={kept}") from error
    if sidecar is None or sidecar.tokenizer is None:
        raise DataError(
            f"{train.prefix} does not record which tokenizer made it; give data.tokenizer=PATH of a tokenizer.json"
        )
    try:
        return Tokenizer.beside(train.prefix, sidecar.tokenizer, eod)
    except DataError:
        if kept.exists() and (own := Tokenizer.load(kept, eod)).sha256 == sidecar.tokenizer_sha256:
            return own
        raise


def _problems(check: Callable[[RunConfig], Iterator[str]], config: RunConfig) -> list[str]:
    found: list[str] = []
    try:
        found.extend(check(config))
    except MegalithError as error:
        found.append(str(error))
    return found


def _check_datasets(config: RunConfig) -> Iterator[str]:
    """Checks that the files exist, are complete, and were made with the same tokenizer."""
    if config.data.train is None:
        yield (
            "data.train is not set; make a dataset with: megalith data prepare FILES... --out PREFIX, "
            "and give data.train=PREFIX"
        )
        return
    opened: dict[str, IndexedDataset] = {}
    prefixes = _datasets(config)
    for name, prefix in prefixes.items():
        try:
            opened[name] = IndexedDataset(prefix)
            opened[name].require_token_ids()
        except DataError as error:
            yield f"{name}: {error}"
    hashes = {name: dataset.sidecar.tokenizer_sha256 for name, dataset in opened.items() if dataset.sidecar is not None}
    known = {name: digest for name, digest in hashes.items() if digest is not None}
    first = next(iter(known), None)
    for name, digest in known.items():
        if first is not None and digest != known[first]:
            yield (
                f"{first} ({prefixes[first]}) and {name} ({prefixes[name]}) were made with different "
                "tokenizers; prepare one of them again with the other's: megalith data prepare ... --tokenizer PATH"
            )


def _check_vocabulary(config: RunConfig) -> Iterator[str]:
    """Checks that the tokenizer is the one that made the data, and that the embedding has a row for every token."""
    train = _dataset(config)
    if train is None:
        return
    sidecar = train.sidecar
    if config.data.tokenizer is not None:
        tokenizer = load_tokenizer(config)
        if sidecar is not None and sidecar.tokenizer_sha256 not in (None, tokenizer.sha256):
            yield (
                f"data.tokenizer ({config.data.tokenizer}) is not the tokenizer that made {config.data.train}; "
                f"leave data.tokenizer out, or prepare the data again with --tokenizer {config.data.tokenizer}"
            )
    needed, given = _rows_needed(config, train), config.model.vocab_size
    if needed is None and given is None:
        yield (
            f"{config.data.train} does not record the size of its vocabulary; "
            "give data.tokenizer=PATH of its tokenizer.json, or model.vocab_size"
        )
    elif needed is not None and given is not None and given < needed:
        yield f"model.vocab_size ({given}) is smaller than the tokenizer needs ({needed}); use {needed} or more"


def _check_token_ids(config: RunConfig) -> Iterator[str]:
    """Checks that the embedding has a row for every token id, as far as this is known before samples are read."""
    train = _dataset(config)
    if train is None:
        return
    needed, given = _rows_needed(config, train), config.model.vocab_size
    vocab_size = needed if given is None else given
    if vocab_size is None or (needed is not None and vocab_size < needed):
        return  # _check_vocabulary reports it
    for name, prefix in _datasets(config).items():
        dataset = _opened(prefix)
        if dataset is None or dataset.dtype.kind == "f":  # _check_datasets reports it
            continue
        found = check_dataset(dataset, vocab_size)
        if found.problem is not None:
            yield f"{name}: {found.problem}"
        if found.scanned is not None and os.environ.get("RANK", "0") == "0":
            log.info("%s: %s", name, found.scanned)


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
            yield from _check_origin_tokenizer(config, open_store(folder))
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
    yield from _check_origin_tokenizer(config, keeper)


def _say_what_differs(described: TransformerConfig, config: RunConfig, where: object) -> None:
    """Logs the settings of the model that differ from those of ``described``, the one whose weights are loaded."""
    # neither changes what is computed with loaded weights
    models = (model.model_dump(exclude={"preset", "init_method_std"}) for model in (described, config.model))
    if told := changed(*models):
        _say(f"the model differs from that of {where}: {', '.join(told)}")


def _check_origin_tokenizer(config: RunConfig, keeper: Store) -> Iterator[str]:
    """Checks that the training data were made with the tokenizer of the model to start from, if ``keeper`` has one."""
    dataset = _dataset(config)
    if dataset is None or KEPT_TOKENIZER not in keeper.names():
        return
    made_with = None if dataset.sidecar is None else dataset.sidecar.tokenizer_sha256
    if config.data.tokenizer is not None:
        made_with = load_tokenizer(config).sha256
    if made_with is None:
        _say(f"{dataset.prefix} does not record which tokenizer made it; it must be that of {keeper}")
    elif made_with != record_of(keeper.parts(KEPT_TOKENIZER)).sha256:
        kept = keeper / KEPT_TOKENIZER
        yield (
            f"{dataset.prefix} was made with a different tokenizer than the model of {keeper} ({kept}); prepare "
            f"the text with that one: megalith data prepare FILES... --out PREFIX --tokenizer {kept}"
        )
    elif config.model.kind == "gpt":
        _tell_of_beginnings(config, dataset, keeper)


def _tell_of_beginnings(config: RunConfig, dataset: IndexedDataset, keeper: Store) -> None:
    """Warns if the model was trained with a token at the start of every text and the new documents lack it."""
    own, tokenizer = kept_marks(keeper).begin, _tokenizer_of(config, dataset)
    begin = tokenizer.begin if own is None else own
    if dataset.tokens[: len(begin)].tolist() != list(begin):
        _say(
            f"the model of {keeper} begins every text with {tokenizer.decode(begin)!r}, but the documents of "
            f"{dataset.prefix} do not; prepare the text again with megalith data prepare, without --no-bos"
        )


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", line)


def _check_compiler(config: RunConfig) -> Iterator[str]:
    """Checks for a C++ compiler, which torch.compile needs on CPUs."""
    if choose_device().type != "cpu" or (compiler := missing_compiler()) is None:
        return
    wanted = {"train.compile": config.train.compile, "train.compile_fusions": config.train.compile_fusions}
    for setting in (setting for setting, is_wanted in wanted.items() if is_wanted):
        yield f"{setting}=true needs a C++ compiler on a CPU, but {compiler} was not found; install it, or set CXX"


def _datasets(config: RunConfig) -> dict[str, str]:
    """Maps the setting that names each dataset of the run to the dataset's prefix; training data first."""
    held_out = {valid_setting(name): prefix for name, prefix in config.data.valid_sets.items()}
    return held_out if config.data.train is None else {"data.train": config.data.train, **held_out}


def _dataset(config: RunConfig) -> IndexedDataset | None:
    """Returns the training data, or None if another check reports what is wrong with them."""
    return _opened(config.data.train)


def _opened(prefix: str | None) -> IndexedDataset | None:
    """Returns the dataset, or None if another check reports what is wrong with it."""
    if prefix is None:
        return None
    try:
        return IndexedDataset(prefix)
    except DataError:
        return None


def _vocabulary(config: RunConfig, train: IndexedDataset) -> int | None:
    """Returns the size of the tokenizer's vocabulary, or None if it is not recorded."""
    if config.data.tokenizer is not None:
        return load_tokenizer(config).vocab_size
    return None if train.sidecar is None else train.sidecar.vocab_size


def _rows_needed(config: RunConfig, train: IndexedDataset) -> int | None:
    """Returns how many rows the embedding needs, or None if that is unknown.

    It is the vocabulary size; if ``model.vocab_size`` is smaller, only ``Tokenizer.num_rows``, those that texts can
    use.
    """
    needed, given = _vocabulary(config, train), config.model.vocab_size
    if needed is None or given is None or needed <= given:
        return needed
    try:
        return load_tokenizer(config).num_rows
    except DataError:  # only the vocabulary size is known
        return needed


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
    if config.train.generation is None or _dataset(config) is None:
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


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """Returns ``config`` with ``model.vocab_size`` filled in."""
    if config.model.vocab_size is not None:
        return config
    train = _dataset(config)
    assert train is not None, "the earlier checks have passed"
    model = config.model.model_copy(update={"vocab_size": _vocabulary(config, train)})
    return config.model_copy(update={"model": model})
