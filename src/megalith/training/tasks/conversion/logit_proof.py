"""Checks that a model and its conversion are equivalent, by comparing our logits of random tokens to transformers'.

Of embedding models the embeddings are compared. transformers has only their encoder, so what follows its hidden states
is computed here a second time: pooling, projection and norm, as sentence-transformers defines them.

Both are computed in float32, one model after the other, on the CPU, so memory must suffice for one of them.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from megalith import optional
from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, MissingDependencyError
from megalith.models.bert_model import BertOutput
from megalith.models.hf import ModelFolder, open_folder
from megalith.models.hf.folder import WHOLE
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
_ROWS, _LONGEST = 2, 64  # the shape of the random tokens
_BYTES_OF_A_PARAMETER = 5  # 4 for float32, the rest for intermediate results of a layer
# relative to the largest logit; float32 rounding is about thirty times smaller, and tanh GELU instead of exact GELU, or
# an epsilon of 1e-6 instead of 1e-5, five times larger
_TOLERANCE = 3e-5


@dataclass(frozen=True)
class LogitProof:
    """The largest difference between two models' logits, and the largest logit, over ``num_tokens`` random tokens.

    ``dtype``: of the weights in the Hugging Face folder, to which ours were rounded too. ``compared``: what takes the
    place of logits.
    """

    max_abs_difference: float
    max_abs_logit: float
    num_tokens: int
    dtype: str
    transformers: str
    compared: Literal["logits", "embeddings"] = "logits"

    def __str__(self) -> str:
        return (
            f"{self.compared} of {self.num_tokens} random tokens differ by {self.max_abs_difference:.1e} at most (the "
            f"largest is {self.max_abs_logit:.1f}), in float32, from those of transformers {self.transformers}"
        )


def stored_proof(run: str | Path | Store, folder: str | Path | Store, out: Path) -> LogitProof | str:
    """Runs ``prove`` and stores ``out/proof.json``; or returns why it cannot run here and how it can.

    Raises as ``prove`` does.
    """
    if (reason := _why_not(folder)) is not None:
        return f"{reason}; then: megalith convert prove RUN HF_FOLDER"
    proof = prove(run, folder)
    write_json_atomic(out / _PROOF, asdict(proof))
    return proof


def prove(run: str | Path | Store, folder: str | Path | Store) -> LogitProof:
    """Checks that the run or checkpoint ``run`` and the model folder ``folder`` are the same model; returns the proof.

    Raises:
        CheckpointError: their logits differ by more than rounding, their tensors differ in names or shapes, one of them
            is damaged, or transformers cannot load the folder.
        MissingDependencyError: transformers is not installed.
    """
    transformers: Any = optional.need("transformers")
    described = open_folder(folder)
    V, S = described.config.vocab_size, min(_LONGEST, described.num_positions)
    assert V is not None, "every config.json specifies it"
    _, _, config = open_run(run)
    written = described.family.written(without_modules(config.model))
    if state_shapes(written) != state_shapes(without_modules(described.config)):
        raise CheckpointError(f"{run} and {folder} are not the same model: the names or shapes of their tensors differ")
    inputs = _inputs(described.config, _random_tokens(described.config, V, S))
    with torch.no_grad():
        ours = _our_logits(run, getattr(torch, described.weights.dtype), inputs)
        theirs = _their_logits(described, transformers, inputs)
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    compared: Literal["logits", "embeddings"] = "embeddings" if described.family.embeds else "logits"
    proof = LogitProof(difference, largest, _ROWS * S, described.weights.dtype, transformers.__version__, compared)
    if not difference <= _TOLERANCE * largest:  # also true for NaN
        raise CheckpointError(f"{run} and {folder} are not the same model: {proof}")
    return proof


def _random_tokens(config: TransformerConfig, V: int, S: int) -> Tensor:
    """Returns int64 [rows, S] without the padding token, by which RoBERTa in transformers counts positions."""
    generator = torch.Generator().manual_seed(0)
    if config.position_offset == 0:
        return torch.randint(V, (_ROWS, S), generator=generator)
    tokens = torch.randint(V - 1, (_ROWS, S), generator=generator)
    return tokens + (tokens >= config.position_offset - 1)


def _inputs(config: TransformerConfig, tokens: Tensor) -> dict[str, Tensor]:
    """Returns ``tokens`` [B, S] as inputs of a model of this kind, by our argument names."""
    if config.t5 is not None:
        return {"tokens": tokens, "decoder_tokens": tokens.flip(1)}
    if config.bert is not None and config.bert.head == "multiple_choice":
        return {"tokens": tokens.unsqueeze(0)}  # a question, with the rows as its choices
    return {"tokens": tokens}


def _our_logits(run: str | Path | Store, rounded_to: torch.dtype, inputs: Mapping[str, Tensor]) -> Tensor:
    # by model kind and not by task, because not every model has a task that trains it
    checkpoint, _, config = open_run(run)
    with torch.device("meta"):
        model = MODELS[config.model.kind](config.model, BuildOptions(ProcessGroupCollection.single(), torch.float32))
    load_into_(model, checkpoint, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.copy_(parameter.to(rounded_to))
    output = model(**inputs)
    # [B, S, V], [B, classes] or [B, D]
    logits: Tensor = output.predictions if isinstance(output, BertOutput) else output
    return logits


def _their_logits(folder: ModelFolder, transformers: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    showed = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    told = logging.getLogger("transformers.modeling_utils")
    told.addFilter(_is_news)
    try:
        # the class that our family table names; code in the folder is never run
        model_class = getattr(transformers, folder.architecture)
        with _theirs(folder):
            model = model_class.from_pretrained(
                str(folder.store),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                **_as_in_files(folder, model_class),
            )
    finally:
        told.removeFilter(_is_news)
        if showed:
            transformers.utils.logging.enable_progress_bar()
    for key in folder.family.tables:  # not weights, but rounded in a half-precision folder: compute them again
        theirs = model.get_parameter(key)
        theirs.copy_(folder.family.tables_of(folder.config, len(theirs))[key])
    with _theirs(folder):
        output = model.eval()(**{_THEIR_NAMES[name]: tokens for name, tokens in inputs.items()})
        if folder.family.embeds:
            return _their_embeddings(folder, output.last_hidden_state)
    # BertForPreTraining has two kinds of logits
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits


def _as_in_files(folder: ModelFolder, model_class: Any) -> dict[str, bool]:
    """Returns arguments of ``model_class`` by which a headless encoder has a pooler only if the files have one.

    transformers initializes a missing one and warns about it, though hidden states do not depend on it.
    """
    name = "add_pooling_layer"
    if not folder.family.embeds or name not in inspect.signature(model_class).parameters:
        return {}
    return {name: any("pooler." in key for key in folder.unread)}


def _their_embeddings(folder: ModelFolder, hidden: Tensor) -> Tensor:
    """Returns embeddings [B, D] of texts with hidden states [B, S, H]; shares no code with our embedding head."""
    bert = folder.config.bert
    assert bert is not None, "only encoders embed"
    embeddings = hidden[:, 0] if bert.embedding_pooling == "first" else hidden.sum(dim=1) / hidden.shape[1]  # [B, H]
    if folder.modules is not None and folder.modules.dense is not None:
        safetensors: Any = optional.need("safetensors.torch")
        dense = safetensors.load_file(str(folder.store / folder.modules.dense / WHOLE))
        weight, bias = (dense[f"linear.{part}"].float() for part in ("weight", "bias"))
        embeddings = embeddings @ weight.T + bias  # [B, D]
    return embeddings / embeddings.square().sum(dim=1, keepdim=True).sqrt() if bert.normalize_embeddings else embeddings


@contextmanager
def _theirs(folder: ModelFolder) -> Iterator[None]:
    """Raises CheckpointError for an error of transformers, which may be any, even for fields that no network needs."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot run {folder.store}: {error}; use --no-proof to skip the proof, which needs it"
        ) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of transformers is not the one about every T5 with untied embeddings.

    ``T5Config`` sets ``tie_word_embeddings``, whatever config.json says, and the message asks to change config.json.
    The weights are loaded untied, as the comparison of logits shows.
    """
    return not record.getMessage().startswith("The tied weights mapping and config for this model specifies to tie")


def _why_not(folder: str | Path | Store) -> str | None:
    """Returns why the model folder ``folder`` cannot be checked here, and what that needs; None if it can."""
    try:
        optional.need("transformers")
    except MissingDependencyError as error:
        return str(error)
    num_parameters = open_folder(folder).weights.num_parameters
    needed, free = _BYTES_OF_A_PARAMETER * num_parameters, free_memory_bytes()
    if free is not None and free < needed:
        return f"it takes {quantity(needed)}B of memory, but only {quantity(free)}B are free; use a larger machine"
    return None
