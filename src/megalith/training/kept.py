"""What a run has left in its folder, found from the folder or from one of its checkpoints."""

import json

from megalith.checkpoint.folders import find_checkpoint
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, DataError, MissingFileError
from megalith.storage import MANIFEST, LocalStore, Store

__all__ = ["EOD_FILE", "KEPT_TOKENIZER", "kept_eod", "kept_tokenizer", "newest_checkpoint", "run_of"]

KEPT_TOKENIZER = "tokenizer.json"
EOD_FILE = "eod.json"


def newest_checkpoint(source: Store) -> Store:
    """``source``, if it is a checkpoint, or the newest complete one of the run in it. Raises CheckpointError."""
    if MANIFEST in source.names():
        return source
    found = find_checkpoint(source / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{source} is neither a run with a complete checkpoint nor a checkpoint; give one of them"
        )
    return found


def run_of(checkpoint: Store) -> Store:
    """The folder of the run that wrote ``checkpoint`` to RUN/checkpoints/step-..., wherever a link to the latter is."""
    run = checkpoint.split()[0].split()[0]
    if "config.yaml" not in run.names() and isinstance(checkpoint, LocalStore):
        resolved = checkpoint.path.resolve()
        return run if resolved == checkpoint.path else run_of(LocalStore(resolved))
    return run


def kept_tokenizer(folder: Store) -> Tokenizer | None:
    """The tokenizer that the run in ``folder`` keeps; None if it keeps none. Raises DataError if it is damaged."""
    try:
        content = folder.read(KEPT_TOKENIZER)
    except MissingFileError:
        return None
    return Tokenizer(content, kept_eod(folder), f"{folder}/{KEPT_TOKENIZER}")


def kept_eod(folder: Store) -> int | None:
    """The id of the token that ends a document; None if the run keeps none. Raises DataError if it is damaged."""
    try:
        kept = json.loads(folder.read(EOD_FILE))
    except MissingFileError:
        return None
    except ValueError:
        kept = None
    if not isinstance(kept, dict) or type(kept.get("id")) is not int:
        raise DataError(
            f'{folder / EOD_FILE} must hold {{"id": number}}; delete it, and the usual names are looked for'
        )
    return int(kept["id"])
