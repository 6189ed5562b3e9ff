"""``megalith convert upcycle``: converts a trained dense model to a mixture of experts, as a run at step 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalith.checkpoint.load import open_tensors
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.checkpoint.verify import verify_checkpoint
from megalith.config import RunConfig, TransformerConfig, load_run
from megalith.data.tokenizer import Tokenizer
from megalith.models.foreign import foreign_model
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import declared_buffers, declared_parameters
from megalith.storage import Store, new_folder, open_store
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.kept import kept_companions, kept_tokenizer
from megalith.training.run_folder import open_run
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.conversion.new_run import write_new_run
from megalith.training.tasks.origin import usual_settings
from megalith.training.tasks.weights import is_weight
from megalith.transformer.module import ModelModule
from megalith.transformer.moe.upcycling_utils import Upcycling, check_upcycling, granularity, inexact_for, upcycled

__all__ = ["Upcycled", "upcycle_model"]


@dataclass(frozen=True)
class Upcycled:
    """The result of upcycling.

    Attributes:
        source: the dense model.
        dense, config: the configs of that model and of the mixture of experts.
        num_parameters: of the latter.
        dtype: of weights that the dense model does not have.
        inexact_for: why the result does not compute the dense model's function initially; empty if it does.
    """

    source: Store
    dense: TransformerConfig
    config: TransformerConfig
    num_parameters: int
    dtype: str
    tokenizer: Tokenizer | None
    inexact_for: tuple[str, ...]


def upcycle_model(
    source: str | Path,
    out: Path,
    overrides: Sequence[str],
    *,
    scaling: Literal["exact", "published"] = "exact",
    noise: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Upcycled:
    """Creates the folder ``out``, a run at step 0 with a mixture of experts made from the dense model ``source``.

    Tensors that are kept stay bitwise identical, in the same dtype; one tensor is in memory at a time. Random values
    depend on ``train.seed``. ``out`` appears only once it is complete.

    Args:
        source: a Megalith run or checkpoint in any layout, a Hugging Face model folder, or a Megatron checkpoint.
        overrides: the settings of ``model.moe``, ``name=value`` each, and any settings outside ``model``.
        scaling, noise: as in ``Upcycling``.
        progress: called with the bytes of tensors written so far and the total.

    Raises:
        ConfigError: the model already has experts, or its MLPs cannot be split into those that ``overrides`` describe.
        CheckpointError: ``source`` is not a sound model.
        StorageError: ``out`` exists, or cannot be written.
    """
    found = _open(source)
    config = load_run({**found.settings, "run": str(out.absolute())}, overrides)
    check_upcycling(found.config, config.model)
    how = Upcycling(config.train.seed, scaling, noise)
    dtype = found.weights.dtype
    model = _on_meta(config, getattr(torch, dtype))
    described, read = _tensors(model, found.weights, config.model, how)
    num_parameters = sum(prod(spec.shape) for _, _, spec in declared_parameters(model))
    record = {
        "source": str(found.store),
        "granularity": granularity(config.model),
        "num_experts": config.model.moe.num_experts if config.model.moe else 0,
        "scaling": scaling,
        "noise": noise,
        "seed": how.seed,
    }
    with new_folder(out) as made:
        write_new_run(
            made,
            config,
            described,
            read,
            tokenizer=found.tokenizer,
            companions=found.companions,
            about={"parameters": num_parameters, "dtype": dtype, "upcycled from": str(found.store)},
            state={"upcycling": record},
            progress=progress,
        )
    why_not = tuple(inexact_for(config.model, how))
    return Upcycled(found.store, found.config, config.model, num_parameters, dtype, found.tokenizer, why_not)


@dataclass(frozen=True)
class _Dense:
    """The dense model. ``settings``: a tree for further training, on the model's own data if it names any."""

    store: Store
    config: TransformerConfig
    settings: Mapping[str, Any]
    weights: StoredTensors
    tokenizer: Tokenizer | None
    companions: Mapping[str, bytes]


def _open(source: str | Path) -> _Dense:
    store = open_store(source)
    if (foreign := foreign_model(store)) is not None:
        usual = usual_settings(foreign.config, foreign.num_positions, foreign.weights.dtype)
        tokenizer, companions = foreign.tokenizer(), foreign.companions()
        return _Dense(foreign.store, foreign.config, usual, foreign.weights, tokenizer, companions)
    checkpoint, folder, run = open_run(store, or_foreign=True)
    verify_checkpoint(checkpoint)
    weights = open_tensors(checkpoint, is_weight)
    usual = usual_settings(run.model, run.data.seq_length, weights.dtype)
    settings = {**usual, "data": run.data}
    return _Dense(checkpoint, run.model, settings, weights, kept_tokenizer(folder), kept_companions(folder))


def _on_meta(config: RunConfig, dtype: torch.dtype) -> ModelModule:
    with torch.device("meta"):
        return task_of(config).build_model(BuildOptions(ProcessGroupCollection.single(), dtype))


def _tensors(
    model: ModelModule, weights: StoredTensors, config: TransformerConfig, how: Upcycling
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Returns the tensors of ``model`` on meta, kept ones as in ``weights``, and a function that reads each."""
    specs = {name: spec for name, _, spec in declared_parameters(model)}
    buffers = {name: spec.make for name, _, spec in declared_buffers(model) if spec.saved}
    new: dict[str, Any] = {name: parameter.detach() for name, parameter, _ in declared_parameters(model)}
    new |= {name: make().to("meta") for name, make in buffers.items()}
    kept = weights.described()
    described = {name: kept.get(name, tensor) for name, tensor in new.items()}

    def read(name: str) -> Tensor:
        if name in kept:
            return weights.read(name)
        if name in buffers:
            return buffers[name]()
        return upcycled(name, specs[name], weights.read, config, how).to(described[name].dtype)

    return described, read
