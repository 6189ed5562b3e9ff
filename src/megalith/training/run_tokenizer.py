"""The tokenizer of a run, found through its settings and its training data."""

from pathlib import Path

from megalith.config import RunConfig
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.sidecar import ChatOrigin
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.training.kept import KEPT_TOKENIZER
from megalith.training.tasks.tokens_of_origin import ends_of_origin

__all__ = ["chats_of_data", "load_tokenizer", "tokenizer_of_data"]


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """Returns the tokenizer of a run: ``data.tokenizer``, or the one named beside its training data.

    If the latter can no longer be read, the run's own copy is used. Of several training datasets, the first one that
    names its tokenizer counts. Texts begin as its documents do: with or without the tokens that the tokenizer puts in
    front of a text. They end as in the model that the run starts from, if that model has the same tokenizer, and as
    turns of the assistant do in the conversations among its data.

    Raises:
        DataError: neither names a tokenizer, or it cannot be read.
    """
    if config.data.train is None:
        raise DataError("the run has no data.train from which to load its tokenizer; set data.train in its config.yaml")
    datasets = [IndexedDataset(prefix) for prefix in config.data.train_sets.values()]
    named = (each for each in datasets if each.sidecar is not None and each.sidecar.tokenizer is not None)
    train = next(named, datasets[0])
    tokenizer = tokenizer_of_data(config, train)
    begin = tokenizer.begin if tokenizer.begins(train.tokens[: len(tokenizer.begin)].tolist()) else ()
    turns = (each.sidecar.chat for each in datasets if each.sidecar is not None and each.sidecar.chat is not None)
    ends_of_turns = [id for chat in turns for id in chat.ends if id < tokenizer.vocab_size]
    return tokenizer.framed(begin=begin, ends=(*ends_of_origin(config, tokenizer), *ends_of_turns))


def chats_of_data(config: RunConfig) -> dict[str, ChatOrigin]:
    """Returns how the conversations among the training data became text, by prefix; no dataset that does not say so.

    Raises DataError if a dataset cannot be read.
    """
    datasets = [IndexedDataset(prefix) for prefix in config.data.train_sets.values()]
    sidecars = {str(dataset.prefix): dataset.sidecar for dataset in datasets if dataset.sidecar is not None}
    return {prefix: sidecar.chat for prefix, sidecar in sidecars.items() if sidecar.chat is not None}


def tokenizer_of_data(config: RunConfig, train: IndexedDataset) -> Tokenizer:
    """Returns the tokenizer that made ``train``, as its own file says that texts begin and end.

    Raises:
        DataError: as ``load_tokenizer``.
    """
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
