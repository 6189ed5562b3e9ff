"""``megalith convert export``: converts a run or one of its checkpoints to a Hugging Face model folder."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint.load import open_tensors
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.checkpoint.verify import verify_checkpoint
from megalith.config import TransformerConfig
from megalith.data.companions import (
    GENERATION,
    companions_without_beginning,
    end_field,
    token_ids,
    written_companions,
)
from megalith.data.special_tokens import spelled
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.models.hf import Family, fitting
from megalith.models.hf.parameters import buffer_shapes, state_shapes
from megalith.models.hf.parameters import check as check_shapes
from megalith.models.hf.write_folder import write_tensors, write_tokenizer
from megalith.models.hf.write_modules import module_files
from megalith.models.multi_token_prediction import without_modules
from megalith.storage import LocalStore, Store, new_folder
from megalith.training.build_model import DTYPES
from megalith.training.kept import KEPT_TOKENIZER, kept_companions, kept_tokenizer
from megalith.training.run_folder import open_run
from megalith.training.state import read_class_names
from megalith.training.tasks.conversion.logit_proof import LogitProof, stored_proof
from megalith.training.tasks.weights import is_weight

__all__ = ["Exported", "export_model"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    ``left_out``: descriptions of parts of the model that were not exported. ``proof``: the comparison of logits, or why
    there is none; None if it was not requested.
    """

    checkpoint: Store
    family: Family
    dtype: str
    tokenizer: Tokenizer | None
    left_out: tuple[str, ...]
    proof: LogitProof | str | None


def export_model(
    source: str | Path,
    out: Path,
    dtype: str | None = None,
    *,
    with_proof: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Exports the run or checkpoint ``source``, in any layout, to the folder ``out``, which transformers can load.

    One tensor is in memory at a time. ``out`` appears only once it is complete. Multi-token prediction modules are left
    out: no family has them, and the model is the same without them (arXiv:2412.19437, section 2.2). So is the binary
    head of an encoder if the family has none.

    Args:
        dtype: of the parameters; by default the run's compute dtype. Buffers are always float32.
        with_proof: compare logits, and store the proof in ``out``, if that is possible here.
        progress: called with the bytes of tensors written so far and the total.

    Raises:
        ConfigError: no family can represent the model, with the reasons for each; position offsets imply a different
            padding token than the run's; or the dtype is unknown.
        CheckpointError: there is no complete checkpoint, it is damaged, or the logits differ.
        StorageError: ``out`` exists, or cannot be written.
    """
    checkpoint, folder, config = open_run(source)
    dtype = dtype or config.precision.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"the dtype must be one of {', '.join(DTYPES)}; got {dtype}")
    family = fitting(without_modules(config.model))
    model, num_positions = family.written(without_modules(config.model)), config.data.seq_length
    tokenizer, companions = _kept(folder)
    hf_config = family.config_to_hf(
        model,
        max_position_embeddings=num_positions,
        dtype=dtype,
        eos_token_id=None if tokenizer is None else tokenizer.eod,
    ) | _named_classes(checkpoint, model)
    longest = model.max_position_embeddings or num_positions
    if tokenizer is None:
        hf_config |= {name: id for name, id in token_ids(companions).items() if hf_config.get(name) is None}
        written = _without_tokenizer(companions, model)
    else:
        ids, written = _with_tokenizer(tokenizer, companions, family, model, longest)
        hf_config |= ids
    if family.embeds:
        written |= module_files(model, longest, companions)
    weights = _checked_weights(checkpoint, config.model)
    with new_folder(out) as made:
        packed, buffers = family.packed(model), buffer_shapes(model)
        dtypes = {
            key: torch.float32 if each.parts[0].parameter in buffers else DTYPES[dtype] for key, each in packed.items()
        }
        tables = family.tables_of(model, hf_config["max_position_embeddings"]) if family.tables else {}
        write_tokenizer(made, tokenizer, written)  # makes the folders of modules
        write_tensors(LocalStore(made), hf_config, packed, weights, dtypes, tables, progress)
        proof = stored_proof(checkpoint, made, made) if with_proof else None
    return Exported(checkpoint, family, dtype, tokenizer, _left_out(config.model, family), proof)


def _checked_weights(checkpoint: Store, model: TransformerConfig) -> StoredTensors:
    verify_checkpoint(checkpoint)
    weights = open_tensors(checkpoint, is_weight)
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    check_shapes(shapes, state_shapes(model), str(checkpoint))
    return weights


def _check_padding(model: TransformerConfig, family: Family, padding: int | None) -> None:
    """Raises ConfigError if transformers would start positions at another row of their table than the run did."""
    offset = model.position_offset
    if offset and padding is not None and padding != offset - 1:
        raise ConfigError(
            f"{family.architecture} counts positions from the row after that of its padding token, and the run's "
            f"tokenizer pads with token {padding}, but model.bert.position_offset={offset} needs {offset - 1}; train "
            f"with model.bert.position_offset={padding + 1}"
        )


def _left_out(model: TransformerConfig, family: Family) -> tuple[str, ...]:
    """Describes the parts of ``model`` that ``family`` does not write."""
    found = []
    if model.mtp is not None:
        found.append(f"the multi-token prediction modules ({model.mtp.num_modules}), which do not affect the logits")
    if family.written(model) != model:
        found.append(
            f"the binary head and its pooler, which {family.architecture} does not have and which do not affect the "
            "logits of tokens"
        )
    return tuple(found)


def _named_classes(checkpoint: Store, model: TransformerConfig) -> dict[str, Any]:
    """Returns a classifier's class names in the format of config.json, if the checkpoint has them."""
    if model.bert is None or model.bert.num_classes is None:
        return {}
    names = read_class_names(checkpoint)
    if len(names) != model.bert.num_classes:
        log.info("%s has no class names; the exported config.json calls them LABEL_0 and so on", checkpoint)
        return {}
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {x: i for i, x in enumerate(names)}}


def _kept(folder: Store) -> tuple[Tokenizer | None, dict[str, bytes]]:
    """Returns the run's tokenizer and companion files, adapted to begin a text as the run's documents did."""
    tokenizer, companions = kept_tokenizer(folder), kept_companions(folder)
    if tokenizer is None or tokenizer.begin:
        return tokenizer, companions
    begin = Tokenizer(folder.read(KEPT_TOKENIZER), tokenizer.eod).begin
    if not begin:
        return tokenizer, companions
    log.info(
        "the run was trained on documents that do not begin with %r, so the exported tokenizer.json no longer adds it "
        "at the start of a text",
        tokenizer.decode(begin),
    )
    return tokenizer.without_beginning(), companions_without_beginning(companions)


def _with_tokenizer(
    tokenizer: Tokenizer, companions: Mapping[str, bytes], family: Family, model: TransformerConfig, num_positions: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the token ids of config.json, and the files to write beside tokenizer.json."""
    fields = _tokenizer_fields(tokenizer, model)
    _tell_of_frame(tokenizer, model, fields)
    ids = _token_ids(tokenizer, model, fields)
    _check_padding(model, family, ids.get("pad_token_id"))
    generation = {} if model.kind == "bert" else ids
    return ids, written_companions(companions, tokenizer, num_positions, fields, generation)


def _without_tokenizer(companions: Mapping[str, bytes], model: TransformerConfig) -> dict[str, bytes]:
    """Returns the files to write if the run keeps no tokenizer: generation settings, if the model writes text."""
    if model.kind == "bert":
        return {}
    if "eos_token_id" not in token_ids(companions):
        log.info(
            "the run has no tokenizer and no known end-of-text token, so the exported config.json has none either; "
            "set eos_token_id there, or transformers always generates up to its length limit"
        )
    return {name: content for name, content in companions.items() if name == GENERATION}


def _tokenizer_fields(tokenizer: Tokenizer, model: TransformerConfig) -> dict[str, Any]:
    """Returns fields for a new tokenizer_config.json: the text of special tokens, and the inputs that a model reads."""
    fields: dict[str, Any] = dict(spelled(tokenizer, model.kind))
    if len(tokenizer.begin) == 1:
        fields["bos_token"] = tokenizer.decode(tokenizer.begin)
    if model.kind != "gpt":  # the default of transformers 4 has token types, that of transformers 5 has none
        has_types = model.bert is not None and model.bert.num_token_types > 1
        fields["model_input_names"] = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    return fields


def _tell_of_frame(tokenizer: Tokenizer, model: TransformerConfig, fields: Mapping[str, Any]) -> None:
    """Logs how to write a text for transformers if tokenizer.json puts other tokens around it than Megalith does."""
    if model.kind == "bert":
        around = [fields.get("cls_token"), fields.get("sep_token")]
    else:
        around = [tokenizer.decode(tokenizer.begin), tokenizer.eod_text if model.kind == "t5" else ""]
    if None in around:
        return
    ours = f"{around[0]}TEXT{around[1]}"
    theirs = "TEXT".join(map(tokenizer.decode, tokenizer.frame))
    if theirs != ours:
        log.info(
            "the exported tokenizer.json makes transformers read a text as %r, but Megalith reads it as %r; to get the "
            "latter, write these tokens into the text and pass add_special_tokens=False",
            theirs,
            ours,
        )


def _token_ids(tokenizer: Tokenizer, model: TransformerConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns token ids for config.json and generation_config.json; a T5's decoder starts with the padding token."""
    ids: dict[str, Any] = {"eos_token_id": end_field(tokenizer.ends)}
    if "bos_token" in fields:
        ids["bos_token_id"] = tokenizer.begin[0]
    if "pad_token" in fields:
        ids["pad_token_id"] = tokenizer.token_id(fields["pad_token"])
        if model.t5 is not None:
            ids["decoder_start_token_id"] = ids["pad_token_id"]
    return ids
