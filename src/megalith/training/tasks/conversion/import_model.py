"""``megalith convert import``: converts a model of another system to a run's folder at step 0."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalith.config import load_run
from megalith.data.class_names import identity_of_classes
from megalith.data.tokenizer import Tokenizer
from megalith.models.foreign import ForeignModel, foreign_model
from megalith.models.hf import ModelFolder, open_folder
from megalith.storage import new_folder
from megalith.training.tasks.conversion.logit_proof import LogitProof, stored_proof
from megalith.training.tasks.conversion.new_run import write_new_run
from megalith.training.tasks.origin import usual_settings

__all__ = ["Imported", "import_model"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Imported:
    """The result of an import. ``proof``: the comparison of logits, or why there is none; None if not requested."""

    folder: ForeignModel
    num_parameters: int
    tokenizer: Tokenizer | None
    proof: LogitProof | str | None


def import_model(
    source: str | Path,
    out: Path,
    eod: str | int | None = None,
    *,
    with_proof: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """Creates the folder ``out``, a run at step 0 with the model of the folder ``source``.

    Weights keep their dtype and are bitwise identical; one tensor is in memory at a time. ``out`` appears only once it
    is complete.

    Args:
        eod: the token of its tokenizer that ends a document; by default the one that config.json names.
        with_proof: compare logits, and store the proof in ``out``, if that is possible here.
        progress: called with the bytes of tensors read so far and the total.

    Raises:
        CheckpointError: ``source`` is not a sound model folder, or the logits differ.
        ConfigError: our model cannot represent it.
        DataError: its tokenizer.json cannot be read, has no token that ends a document, or produces ids for which the
            model has no row.
        StorageError: ``out`` exists, or cannot be written.
    """
    folder = foreign_model(source) or open_folder(source)
    for note in folder.notes:
        log.info(note)
    tokenizer = folder.tokenizer(eod)
    if tokenizer is not None:
        assert folder.config.vocab_size is not None, "a model folder specifies it"
        tokenizer.check_fits(str(folder.store), folder.config.vocab_size)
    settings = usual_settings(folder.config, folder.num_positions, folder.weights.dtype) | {"run": str(out.absolute())}
    config = load_run(settings)
    num_parameters = folder.weights.num_parameters
    with new_folder(out) as made:
        write_new_run(
            made,
            config,
            folder.weights.described(),
            folder.weights.read,
            tokenizer=tokenizer,
            companions=folder.companions(),
            state={"data": {"identity": identity_of_classes(folder.class_names)}} if folder.class_names else None,
            about={"parameters": num_parameters, "dtype": folder.weights.dtype, "imported from": str(folder.store)},
            progress=progress,
        )
        proof = _proof(made, folder) if with_proof else None
    return Imported(folder, num_parameters, tokenizer, proof)


def _proof(made: Path, folder: ForeignModel) -> LogitProof | str:
    if isinstance(folder, ModelFolder):
        return stored_proof(made, folder.store, made)
    return "transformers cannot load a Megatron checkpoint; compare the loss on held-out text instead: megalith eval"
