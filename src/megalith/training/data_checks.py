"""Checks of a run's datasets against each other, its tokenizer and its model, before its process group starts."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from megalith.config import RunConfig, train_setting, valid_setting
from megalith.data.conversations import holds_conversations
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.token_ids import check_dataset
from megalith.errors import DataError
from megalith.storage import Store, record_of
from megalith.training.kept import KEPT_TOKENIZER, kept_marks
from megalith.training.run_tokenizer import chats_of_data, load_tokenizer, tokenizer_of_data

__all__ = [
    "check_beginnings",
    "check_chat_templates",
    "check_datasets",
    "check_origin_tokenizer",
    "check_token_ids",
    "check_vocabulary",
    "say",
    "train_datasets",
    "with_vocabulary",
]

log = logging.getLogger(__name__)


def check_datasets(config: RunConfig) -> Iterator[str]:
    """Checks that the files exist, are complete, differ, and were made with the same tokenizer and end-of-document."""
    if config.data.train is None:
        yield (
            "data.train is not set; make a dataset with: megalith data prepare FILES... --out PREFIX, "
            "and give data.train=PREFIX"
        )
        return
    opened: dict[str, IndexedDataset] = {}
    prefixes = _prefixes(config)
    for name, prefix in prefixes.items():
        try:
            opened[name] = IndexedDataset(prefix)
            opened[name].require_token_ids()
        except DataError as error:
            yield f"{name}: {error}"
    sidecars = {name: dataset.sidecar for name, dataset in opened.items() if dataset.sidecar is not None}
    for first, name in _differing({name: sidecar.tokenizer_sha256 for name, sidecar in sidecars.items()}):
        yield (
            f"{first} ({prefixes[first]}) and {name} ({prefixes[name]}) were made with different "
            "tokenizers; prepare one of them again with the other's: megalith data prepare ... --tokenizer PATH"
        )
    for first, name in _differing({name: sidecar.eod for name, sidecar in sidecars.items()}):
        yield (
            f"documents of {first} ({prefixes[first]}) and {name} ({prefixes[name]}) end with different tokens, "
            f"{sidecars[first].eod} and {sidecars[name].eod}; prepare one of them again with the other's --eod"
        )
    yield from _named_twice(config)


def _differing(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields the first name with a value, and each name that has another one."""
    known = {name: value for name, value in values.items() if value is not None}
    first = next(iter(known), "")
    yield from ((first, name) for name, value in known.items() if value != known[first])


def _named_twice(config: RunConfig) -> Iterator[str]:
    """Checks that no two training datasets are one file, reached by symbolic links."""
    files: dict[str, str] = {}
    for name, prefix in config.data.train_sets.items():
        if "://" in prefix:
            continue
        other = files.setdefault(os.path.realpath(f"{prefix}.bin"), name)
        if other != name:
            yield (
                f"{train_setting(other)} and {train_setting(name)} lead to the same file, whose samples would be drawn "
                "twice in the same order; name it once, with both weights"
            )


def check_beginnings(config: RunConfig) -> Iterator[str]:
    """Warns if texts of only some training datasets begin with the tokens that the tokenizer puts there."""
    # how a conversation begins is up to its chat template
    datasets = [dataset for dataset in train_datasets(config) if not holds_conversations(dataset)]
    begin: tuple[int, ...] = ()
    if len(datasets) > 1:
        with suppress(DataError):  # other checks report it, or the datasets name no tokenizer
            begin = tokenizer_of_data(config, datasets[0]).begin
    begun = [dataset.tokens[: len(begin)].tolist() == list(begin) for dataset in datasets]
    if any(begun) and not all(begun):
        first, other = datasets[begun.index(True)], datasets[begun.index(False)]
        say(
            f"documents of {first.prefix} begin with the tokens {list(begin)}, those of {other.prefix} do not; prepare "
            "both with or without --no-bos"
        )
    yield from ()


def check_chat_templates(config: RunConfig) -> Iterator[str]:
    """Warns if conversations were made with different chat templates: the run keeps only one."""
    if not train_datasets(config):  # another check reports it
        return
    made = {
        prefix: (chat.template, chat.tools_template)
        for prefix, chat in chats_of_data(config).items()
        if chat.template is not None
    }
    if differing := list(_differing(made)):
        first, other = differing[0]
        say(
            f"the conversations of {first} and {other} were made with different chat templates; the run keeps that of "
            f"{first}, for asking it and for its export; prepare both with the same --chat-template"
        )
    yield from ()


def check_vocabulary(config: RunConfig) -> Iterator[str]:
    """Checks that the tokenizer is the one that made the data, and that the embedding has a row for every token."""
    datasets = train_datasets(config)
    if not datasets:
        return
    if config.data.tokenizer is not None:
        tokenizer = load_tokenizer(config)
        for dataset in datasets:
            if dataset.sidecar is not None and dataset.sidecar.tokenizer_sha256 not in (None, tokenizer.sha256):
                yield (
                    f"data.tokenizer ({config.data.tokenizer}) is not the tokenizer that made {dataset.prefix}; "
                    f"leave data.tokenizer out, or prepare the data again with --tokenizer {config.data.tokenizer}"
                )
    needed, given = _rows_needed(config, datasets), config.model.vocab_size
    if needed is None and given is None:
        yield (
            f"{datasets[0].prefix} does not record the size of its vocabulary; "
            "give data.tokenizer=PATH of its tokenizer.json, or model.vocab_size"
        )
    elif needed is not None and given is not None and given < needed:
        yield f"model.vocab_size ({given}) is smaller than the tokenizer needs ({needed}); use {needed} or more"


def check_token_ids(config: RunConfig) -> Iterator[str]:
    """Checks that the embedding has a row for every token id, as far as this is known before samples are read."""
    datasets = train_datasets(config)
    if not datasets:
        return
    needed, given = _rows_needed(config, datasets), config.model.vocab_size
    vocab_size = needed if given is None else given
    if vocab_size is None or (needed is not None and vocab_size < needed):
        return  # check_vocabulary reports it
    for name, prefix in _prefixes(config).items():
        dataset = _opened(prefix)
        if dataset is None or dataset.dtype.kind == "f":  # check_datasets reports it
            continue
        found = check_dataset(dataset, vocab_size)
        if found.problem is not None:
            yield f"{name}: {found.problem}"
        if found.scanned is not None and os.environ.get("RANK", "0") == "0":
            log.info("%s: %s", name, found.scanned)


def check_origin_tokenizer(config: RunConfig, keeper: Store) -> Iterator[str]:
    """Checks that the training data were made with the tokenizer of the model to start from, if ``keeper`` has one."""
    datasets = train_datasets(config)
    if not datasets or KEPT_TOKENIZER not in keeper.names():
        return
    given = None if config.data.tokenizer is None else load_tokenizer(config).sha256
    for dataset in datasets:
        recorded = None if dataset.sidecar is None else dataset.sidecar.tokenizer_sha256
        made_with = recorded if given is None else given
        if made_with is None:
            say(f"{dataset.prefix} does not record which tokenizer made it; it must be that of {keeper}")
        elif made_with != record_of(keeper.parts(KEPT_TOKENIZER)).sha256:
            kept = keeper / KEPT_TOKENIZER
            yield (
                f"{dataset.prefix} was made with a different tokenizer than the model of {keeper} ({kept}); prepare "
                f"the text with that one: megalith data prepare FILES... --out PREFIX --tokenizer {kept}"
            )
        elif config.model.kind == "gpt" and not holds_conversations(dataset):  # a chat template writes such tokens
            _tell_of_beginnings(config, dataset, keeper)


def _tell_of_beginnings(config: RunConfig, dataset: IndexedDataset, keeper: Store) -> None:
    """Warns if the model was trained with a token at the start of every text and the new documents lack it."""
    own, tokenizer = kept_marks(keeper).begin, tokenizer_of_data(config, dataset)
    begin = tokenizer.begin if own is None else own
    if dataset.tokens[: len(begin)].tolist() != list(begin):
        say(
            f"the model of {keeper} begins every text with {tokenizer.decode(begin)!r}, but the documents of "
            f"{dataset.prefix} do not; prepare the text again with megalith data prepare, without --no-bos"
        )


def say(line: str) -> None:
    """Logs a warning about the run's input, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", line)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Returns ``config`` with ``model.vocab_size`` filled in."""
    if config.model.vocab_size is not None:
        return config
    vocab_size = _vocabulary(config, train_datasets(config))
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})


def train_datasets(config: RunConfig) -> list[IndexedDataset]:
    """Returns the training data; none if ``check_datasets`` reports that some cannot be read."""
    found = [_opened(prefix) for prefix in config.data.train_sets.values()]
    return [] if None in found else [dataset for dataset in found if dataset is not None]


def _prefixes(config: RunConfig) -> dict[str, str]:
    """Maps the setting that names each dataset of the run to the dataset's prefix; training data first."""
    trained_on = {train_setting(name): prefix for name, prefix in config.data.train_sets.items()}
    return trained_on | {valid_setting(name): prefix for name, prefix in config.data.valid_sets.items()}


def _opened(prefix: str) -> IndexedDataset | None:
    """Returns the dataset, or None if another check reports what is wrong with it."""
    try:
        return IndexedDataset(prefix)
    except DataError:
        return None


def _vocabulary(config: RunConfig, datasets: list[IndexedDataset]) -> int | None:
    """Returns the size of the tokenizer's vocabulary, or None if it is not recorded."""
    if config.data.tokenizer is not None:
        return load_tokenizer(config).vocab_size
    sizes = (dataset.sidecar.vocab_size for dataset in datasets if dataset.sidecar is not None)
    return next((size for size in sizes if size is not None), None)


def _rows_needed(config: RunConfig, datasets: list[IndexedDataset]) -> int | None:
    """Returns how many rows the embedding needs, or None if that is unknown.

    It is the vocabulary size; if ``model.vocab_size`` is smaller, only ``Tokenizer.num_rows``, those that texts can
    use.
    """
    needed, given = _vocabulary(config, datasets), config.model.vocab_size
    if needed is None or given is None or needed <= given:
        return needed
    try:
        return load_tokenizer(config).num_rows
    except DataError:  # only the vocabulary size is known
        return needed
