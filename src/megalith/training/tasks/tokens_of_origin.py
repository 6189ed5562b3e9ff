"""What a run's tokenizer takes over from the model that the run starts from, if both have the same tokenizer."""

from pathlib import Path

from megalith.config import RunConfig
from megalith.data.companions import companions_without_tokenizer, read_companions
from megalith.data.tokenizer import Tokenizer
from megalith.models.hf.folder import companions_alone, end_tokens, is_model_folder
from megalith.storage import MANIFEST, LocalStore, Store, open_store, record_of
from megalith.training.kept import KEPT_TOKENIZER, kept_companions, kept_marks, run_of

__all__ = ["companions_of_origin", "ends_of_origin", "goes_on"]


def ends_of_origin(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns ids of the tokens that end a text in the model that the run starts from or continues.

    Empty if that model has another tokenizer. The same on every rank.

    Raises DataError or CheckpointError for damaged files.
    """
    origin = _origin(config, tokenizer)
    if origin is None:
        return ()
    return end_tokens(origin, tokenizer.vocab_size) if is_model_folder(origin) else kept_marks(origin).ends


def companions_of_origin(config: RunConfig, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Returns the files next to the tokenizer of that model, by name.

    If the run's tokenizer is unknown, it is assumed to use the model's ids, and only the files that make sense without
    a tokenizer are returned. Raises as ``read_companions`` does.
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
    """Returns whether the run starts from its own checkpoint, because it was saved before or converted from a model."""
    # checks only names: find_checkpoint is a collective, and rank 0 also calls this alone
    names = (LocalStore(Path(config.run)) / "checkpoints").names()
    return config.resume == "auto" and any(name.startswith("step-") for name in names)


def _origin(config: RunConfig, tokenizer: Tokenizer | None) -> Store | None:
    """Returns the run's own folder if it continues, or that of ``load``; None if its tokenizer differs."""
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
