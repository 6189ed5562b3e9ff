"""What a run's tokenizer takes over from the model that the run begins from, where both have the same one."""

from pathlib import Path

from megalith.config import RunConfig
from megalith.data.companions import companions_without_tokenizer, read_companions
from megalith.data.tokenizer import Tokenizer
from megalith.models.hf.folder import companions_alone, end_tokens, is_model_folder
from megalith.storage import MANIFEST, LocalStore, Store, open_store, record_of
from megalith.training.kept import KEPT_TOKENIZER, kept_companions, kept_marks, run_of

__all__ = ["companions_of_origin", "ends_of_origin", "goes_on"]


def ends_of_origin(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a text of the model that the run begins from, or goes on with.

    () where that has another tokenizer. Every rank finds the same.

    Raises DataError or CheckpointError for damaged files.
    """
    origin = _origin(config, tokenizer)
    if origin is None:
        return ()
    return end_tokens(origin, tokenizer.vocab_size) if is_model_folder(origin) else kept_marks(origin).ends


def companions_of_origin(config: RunConfig, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Files that stand beside the tokenizer of that model, by name.

    Where the run does not know its tokenizer, the ids of the model are taken to be its own: what is kept without one.
    Raises as ``read_companions``.
    """
    origin = _origin(config, tokenizer)
    if origin is None:
        return {}
    vocab_size = config.model.vocab_size or 0
    if is_model_folder(origin):
        return companions_alone(origin, vocab_size) if tokenizer is None else read_companions(origin)
    kept = kept_companions(origin)
    if tokenizer is None:
        return companions_without_tokenizer(kept, {}, kept_marks(origin).ends, vocab_size)
    return kept


def goes_on(config: RunConfig) -> bool:
    """Whether the run begins from a checkpoint of its own: it was saved before, or made of a model."""
    # by its name alone: find_checkpoint speaks to all ranks, and rank 0 comes here by itself, too
    names = (LocalStore(Path(config.run)) / "checkpoints").names()
    return config.resume == "auto" and any(name.startswith("step-") for name in names)


def _origin(config: RunConfig, tokenizer: Tokenizer | None) -> Store | None:
    """The folder that keeps them: the run's own if it goes on, or that of ``load``; None of another tokenizer."""
    found: Store = LocalStore(Path(config.run))
    if not goes_on(config):
        if config.load is None:
            return None
        found = open_store(config.load)
        found = run_of(found) if MANIFEST in found.names() else found
    if tokenizer is None:
        return found
    if KEPT_TOKENIZER not in found.names() or record_of(found.parts(KEPT_TOKENIZER)).sha256 != tokenizer.sha256:
        return None
    return found
