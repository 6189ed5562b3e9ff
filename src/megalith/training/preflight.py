"""Everything that can be wrong with a run, found before a rank starts or torch is loaded, and told at once."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megalith import optional
from megalith.checkpoint.folders import find_checkpoint
from megalith.config import RunConfig, load_run, recipe_names
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, MegalithError, MissingDependencyError
from megalith.observe.trackers import packages
from megalith.storage import MANIFEST, child, open_store
from megalith.training.process_group import choose_device

__all__ = ["load_tokenizer", "preflight", "resolve_source"]


def resolve_source(source: str | None, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe or file, and the overrides. Raises ConfigError naming the recipes when there is none."""
    if source is None or "=" in source:
        raise ConfigError(
            f"name a recipe or a YAML file first: {', '.join(recipe_names())}; "
            "for example: megalith train llama-4m data.train=PREFIX"
        )
    return source, list(overrides)


def preflight(source: str, overrides: Sequence[str], world_size: int) -> RunConfig:
    """The resolved settings of a run that can start: every rule holds, and what it reads is there.

    Raises:
        ConfigError: with every violation, each naming a way out.
    """
    config = load_run(source, overrides, world_size=world_size)
    problems: list[str] = []
    for check in (_check_datasets, _check_vocabulary, _check_folders, _check_compiler, _check_trackers):
        problems += _problems(check, config)
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "this run cannot start:\n  " + "\n  ".join(problems))
    return _with_vocabulary(config)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run: ``data.tokenizer``, or the one named beside its training data.

    Raises:
        DataError: neither names one, or it cannot be read.
    """
    assert config.data.train is not None, "the checks before have passed"
    sidecar = IndexedDataset(config.data.train).sidecar
    eod = None if sidecar is None else sidecar.eod  # a tokenizer may end documents with an unusual token
    if config.data.tokenizer is not None:
        return Tokenizer.load(config.data.tokenizer, eod)
    if sidecar is None or sidecar.tokenizer is None:
        raise DataError(
            f"{config.data.train} does not say which tokenizer made it; give data.tokenizer=PATH of a tokenizer.json"
        )
    return Tokenizer.load(Path(config.data.train).parent / sidecar.tokenizer, eod)


def _problems(check: Callable[[RunConfig], Iterator[str]], config: RunConfig) -> list[str]:
    found: list[str] = []
    try:
        found.extend(check(config))
    except MegalithError as error:
        found.append(str(error))
    return found


def _check_datasets(config: RunConfig) -> Iterator[str]:
    """The files are there, whole, and of one tokenizer."""
    if config.data.train is None:
        yield (
            "data.train is not set; make a dataset with: megalith data prepare FILES... --out PREFIX, "
            "and give data.train=PREFIX"
        )
        return
    opened: dict[str, IndexedDataset] = {}
    for name, prefix in (("data.train", config.data.train), ("data.valid", config.data.valid)):
        if prefix is None:
            continue
        try:
            opened[name] = IndexedDataset(prefix)
        except DataError as error:
            yield f"{name}: {error}"
    hashes = {name: dataset.sidecar.tokenizer_sha256 for name, dataset in opened.items() if dataset.sidecar is not None}
    if len({digest for digest in hashes.values() if digest is not None}) > 1:
        yield (
            f"data.train ({config.data.train}) and data.valid ({config.data.valid}) were made with different "
            "tokenizers; prepare one of them again with the other's: megalith data prepare ... --tokenizer PATH"
        )


def _check_vocabulary(config: RunConfig) -> Iterator[str]:
    """The tokenizer is the one that made the data, and every token has a row in the embedding."""
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
    needed, given = _vocabulary(config, train), config.model.vocab_size
    if needed is None and given is None:
        yield (
            f"{config.data.train} does not say how large its vocabulary is; "
            "give data.tokenizer=PATH of its tokenizer.json, or model.vocab_size"
        )
    elif needed is not None and given is not None and given < needed:
        yield f"model.vocab_size ({given}) is smaller than the tokenizer's vocabulary ({needed}); use {needed} or more"


def _check_folders(config: RunConfig) -> Iterator[str]:
    """What is to be loaded is there, and a run that is there already is not mixed with a new one."""
    folder = Path(config.run)
    if folder.exists() and not folder.is_dir():
        yield f"run ({folder}) is a file; choose another folder with run=..."
    elif config.resume == "never" and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        yield f"{folder} holds a run already and resume=never would mix with it; choose another run=..., or resume=auto"
    if config.load is not None and MANIFEST not in open_store(config.load).names():
        newest = find_checkpoint(child(config.load, "checkpoints"))
        way_out = f"load={newest}" if newest else "a folder such as RUN/checkpoints/step-00000100"
        yield f"load ({config.load}) is not a complete checkpoint; give {way_out}"


def _check_compiler(config: RunConfig) -> Iterator[str]:
    """On CPUs torch.compile writes C++."""
    if not config.train.compile:
        return
    compiler = os.environ.get("CXX", "g++")
    if choose_device().type == "cpu" and shutil.which(compiler) is None:
        yield f"train.compile=true needs a C++ compiler on a CPU, and there is no {compiler}; install it, or set CXX"


def _dataset(config: RunConfig) -> IndexedDataset | None:
    """The training data, or None where another check has told what is wrong with them."""
    if config.data.train is None:
        return None
    try:
        return IndexedDataset(config.data.train)
    except DataError:
        return None


def _vocabulary(config: RunConfig, train: IndexedDataset) -> int | None:
    """How many entries the run's tokenizer has, if anything says so."""
    if config.data.tokenizer is not None:
        return load_tokenizer(config).vocab_size
    return None if train.sidecar is None else train.sidecar.vocab_size


def _check_trackers(config: RunConfig) -> Iterator[str]:
    """What writes the dashboards that were asked for is installed."""
    for package in packages(config.tracking):
        if not optional.has(package):
            try:
                optional.need(package)
            except MissingDependencyError as error:
                yield f"tracking ({', '.join(config.tracking or ())}): {error}"


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """``config`` whose model knows the size of its vocabulary."""
    if config.model.vocab_size is not None:
        return config
    train = _dataset(config)
    assert train is not None, "the checks before have passed"
    model = config.model.model_copy(update={"vocab_size": _vocabulary(config, train)})
    return config.model_copy(update={"model": model})
