"""Whether a model and its conversion are the same function: logits of random tokens, ours beside those of transformers.

Both are computed in float32, one model after the other, on the CPU, where one of them has to fit.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalith import optional
from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, MissingDependencyError
from megalith.models.bert_model import BertOutput
from megalith.models.hf import ModelFolder, open_folder
from megalith.models.hf.parameters import state_shapes
from megalith.models.kinds import MODELS
from megalith.models.multi_token_prediction import without_modules
from megalith.observe.machine import free_memory_bytes
from megalith.observe.units import quantity
from megalith.parallel.build_options import BuildOptions
from megalith.storage import Store, write_json_atomic
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.inference import load_into_
from megalith.training.run_folder import open_run

__all__ = ["LogitProof", "prove", "stored_proof"]

_PROOF = "proof.json"
_THEIR_NAMES = MappingProxyType({"tokens": "input_ids", "decoder_tokens": "decoder_input_ids"})
_ROWS, _LONGEST = 2, 64  # of random tokens
_BYTES_OF_A_PARAMETER = 5  # 4 of float32, and what a layer of it computes
# of the largest logit; rounding of float32 is some thirty times smaller, and GELU by tanh in place of exact GELU, or an
# epsilon of 1e-6 in place of 1e-5, five times larger
_TOLERANCE = 3e-5


@dataclass(frozen=True)
class LogitProof:
    """The largest difference between two models' logits, beside the largest logit, over ``num_tokens`` random tokens.

    ``dtype``: that of the weights in the Hugging Face folder, to which ours were rounded too.
    """

    max_abs_difference: float
    max_abs_logit: float
    num_tokens: int
    dtype: str
    transformers: str

    def __str__(self) -> str:
        return (
            f"logits of {self.num_tokens} random tokens differ by {self.max_abs_difference:.1e} at most (the largest "
            f"is {self.max_abs_logit:.1f}), in float32, from those of transformers {self.transformers}"
        )


def stored_proof(run: str | Path | Store, folder: str | Path | Store, out: Path) -> LogitProof | str:
    """``prove``, stored as ``out/proof.json``; or why that cannot be done here, and how it can. Raises as ``prove``."""
    if (reason := _why_not(folder)) is not None:
        return f"{reason}; then: megalith convert prove RUN HF_FOLDER"
    proof = prove(run, folder)
    write_json_atomic(out / _PROOF, asdict(proof))
    return proof


def prove(run: str | Path | Store, folder: str | Path | Store) -> LogitProof:
    """The proof that the run or checkpoint ``run`` and the model folder ``folder`` are the same model.

    Raises:
        CheckpointError: their logits differ by more than rounding, their tensors are others, one of them is damaged, or
            transformers cannot load the folder.
        MissingDependencyError: transformers is not installed.
    """
    transformers: Any = optional.need("transformers")
    described = open_folder(folder)
    V, S = described.config.vocab_size, min(_LONGEST, described.num_positions)
    assert V is not None, "every config.json says it"
    _, _, config = open_run(run)
    written = described.family.written(without_modules(config.model))
    if state_shapes(written) != state_shapes(without_modules(described.config)):
        raise CheckpointError(f"{run} and {folder} are not the same model: their tensors have other names or shapes")
    inputs = _inputs(described.config, _random_tokens(described.config, V, S))
    with torch.no_grad():
        ours = _our_logits(run, getattr(torch, described.weights.dtype), inputs)
        theirs = _their_logits(described, transformers, inputs)
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    proof = LogitProof(difference, largest, _ROWS * S, described.weights.dtype, transformers.__version__)
    if not difference <= _TOLERANCE * largest:  # NaN is no proof
        raise CheckpointError(f"{run} and {folder} are not the same model: {proof}")
    return proof


def _random_tokens(config: TransformerConfig, V: int, S: int) -> Tensor:
    """int64 [rows, S]; none is the padding by which a RoBERTa of theirs counts positions, and ours does not."""
    generator = torch.Generator().manual_seed(0)
    if config.position_offset == 0:
        return torch.randint(V, (_ROWS, S), generator=generator)
    tokens = torch.randint(V - 1, (_ROWS, S), generator=generator)
    return tokens + (tokens >= config.position_offset - 1)


def _inputs(config: TransformerConfig, tokens: Tensor) -> dict[str, Tensor]:
    """Random ``tokens`` [B, S] as a model of this kind takes them, by the names that both sides have."""
    if config.t5 is not None:
        return {"tokens": tokens, "decoder_tokens": tokens.flip(1)}
    if config.bert is not None and config.bert.head == "multiple_choice":
        return {"tokens": tokens.unsqueeze(0)}  # a question, with the rows as its choices
    return {"tokens": tokens}


def _our_logits(run: str | Path | Store, rounded_to: torch.dtype, inputs: Mapping[str, Tensor]) -> Tensor:
    # by its kind: a model that no task of ours trains is proven too
    checkpoint, _, config = open_run(run)
    with torch.device("meta"):
        model = MODELS[config.model.kind](config.model, BuildOptions(ProcessGroupCollection.single(), torch.float32))
    load_into_(model, checkpoint, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.copy_(parameter.to(rounded_to))
    output = model(**inputs)
    logits: Tensor = output.predictions if isinstance(output, BertOutput) else output  # [B, S, V], or [B, classes]
    return logits


def _their_logits(folder: ModelFolder, transformers: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    showed = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        # the class of the table, and never code that a folder brings along
        model = getattr(transformers, folder.architecture).from_pretrained(
            str(folder.store), dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        for key in folder.family.tables:  # rounded in a folder of half precision, and no weights
            theirs = model.get_parameter(key)
            theirs.copy_(folder.family.tables_of(folder.config, len(theirs))[key])
        output = model.eval()(**{_THEIR_NAMES[name]: tokens for name, tokens in inputs.items()})
        # BertForPreTraining has two kinds of them
        logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    except Exception as error:  # whatever it makes of fields that the network does not need
        raise CheckpointError(
            f"transformers cannot run {folder.store}: {error}; --no-proof leaves the proof out, which needs it"
        ) from error
    finally:
        if showed:
            transformers.utils.logging.enable_progress_bar()
    return logits


def _why_not(folder: str | Path | Store) -> str | None:
    """Why no proof for the model folder ``folder`` can be made here, and what it takes; None if it can."""
    try:
        optional.need("transformers")
    except MissingDependencyError as error:
        return str(error)
    num_parameters = open_folder(folder).weights.num_parameters
    needed, free = _BYTES_OF_A_PARAMETER * num_parameters, free_memory_bytes()
    if free is not None and free < needed:
        return f"it takes {quantity(needed)}B of memory, of which {quantity(free)}B are free; use a larger machine"
    return None
