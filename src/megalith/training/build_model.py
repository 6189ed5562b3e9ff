"""From a task to this rank's part of its model: cut into stages, recomputed, compiled, sharded, and drawn."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megalith.acceleration.recompute import DiscardableOutput, discard_outputs_, recompute_modules_
from megalith.config import RunConfig
from megalith.config.experimental import require
from megalith.errors import ConfigError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import declared_parameters
from megalith.parallel.pipeline.links import open_links
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.schedules import placement_of
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.parallel.pipeline.stages import balanced_stages, listed_stages
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.agreement import agreed
from megalith.topology.rank_groups import ParallelState
from megalith.torch_compat import compile_layers_, new_group
from megalith.training.tasks.task import AnyTask, Task
from megalith.transformer.module import ModelModule
from megalith.transformer.stage import Stage

__all__ = ["DTYPES", "build_pipeline", "param_dtype", "placement_of_run", "stages_of"]

# precision.dtype -> the dtype of the computation
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def param_dtype(config: RunConfig) -> torch.dtype:
    """What parameters, gradients and the optimizer's state are kept in: float32, or wider for a wider computation."""
    return torch.promote_types(DTYPES[config.precision.dtype], torch.float32)


def build_pipeline(
    config: RunConfig, task: AnyTask, options: BuildOptions, state: ParallelState, device: torch.device
) -> Pipeline[ModelModule]:
    """This rank's chunks of the model, with its links to the ranks of the other stages; all ranks call it.

    Raises:
        ConfigError: the model of ``task`` cannot be cut into the stages that are wanted.
    """
    placement, rank = placement_of_run(config), state.rank("pp")
    if placement.num_stages == 1:
        return Pipeline([_build_model(config, task, options, device, None)])
    with agreed():  # the links are opened by all ranks or none
        stages = stages_of(config, task)
        chunks = [
            _build_model(config, task, options, device, stages[placement.stage(rank, chunk)])
            for chunk in range(placement.num_chunks)
        ]
        _require_names_of_their_own(chunks)
        sharing = {placement.stage(rank, index): tuple(chunk.shared_weights()) for index, chunk in enumerate(chunks)}
        sharing = {stage: weights for stage, weights in sharing.items() if weights}
        if wrong := sharing.keys() - {0, placement.num_stages - 1}:
            raise ConfigError(
                f"weights can be shared by the first and the last stage of a pipeline only; {type(chunks[0]).__name__} "
                f"shares some in stage {min(wrong)} of {placement.num_stages}; use parallel.pipeline=1"
            )
    ranks = state.ranks("pp")
    links = open_links(placement, rank, ranks, task.hidden_dtype(DTYPES[config.precision.dtype]), device)
    split_product = options.matrix_product if isinstance(options.matrix_product, SplitProduct) else None
    pipeline = Pipeline(chunks, placement, config.parallel.schedule, links, split_product)
    if len(sharing) == 2:  # both ends of a V
        weights, copies = sharing[0], sharing[placement.num_stages - 1]
        return replace(pipeline, copies=tuple(zip(weights, copies, strict=True)))
    if sharing:
        [weights], group = sharing.values(), new_group([ranks[0], ranks[-1]], None, None, None)
        return replace(pipeline, shared=weights, shared_group=group)
    return pipeline


def placement_of_run(config: RunConfig) -> Placement:
    """Where the stages of the run's pipeline lie."""
    return placement_of(config.parallel.schedule, config.parallel.pipeline, config.parallel.virtual)


def stages_of(config: RunConfig, task: AnyTask) -> list[Stage]:
    """Which layers each stage of the run's pipeline has. Raises ConfigError for a model that has no stages."""
    parallel, costs = config.parallel, task.costs()
    if type(task).hidden_shape is Task.hidden_shape:
        raise ConfigError(
            f"{type(task).__name__} has costs() and no hidden_shape(), which says what a stage receives from the one "
            "before; give it one, or use parallel.pipeline=1"
        )
    num_stages, listed = parallel.pipeline * parallel.virtual, parallel.stage_layers
    ranges = balanced_stages(costs, num_stages) if listed is None else listed_stages(listed)
    return [
        Stage(layers.start, layers.stop, has_embedding=number == 0, has_head=number == num_stages - 1)
        for number, layers in enumerate(ranges)
    ]


def _build_model(
    config: RunConfig, task: AnyTask, options: BuildOptions, device: torch.device, stage: Stage | None
) -> ModelModule:
    """A stage on meta; recomputation, compilation and sharding applied to it; and then its memory and weights."""
    with torch.device("meta"):
        model = task.build_model(options) if stage is None else task.build_model(options, stage)
    if config.train.recompute == "full":
        recompute_modules_(model.layers())
    elif config.train.recompute == "selective":
        _recompute_named_(model, config.train.recompute_modules)
    if config.train.compile:
        require("compile", config)
        compile_layers_(model.layers())
    shard_model(
        model,
        model.fsdp_units(),
        options.pg_collection,
        compute_dtype=DTYPES[config.precision.dtype],
        param_dtype=options.dtype,
        # a stage's weights are needed again soon, for the next micro-batch
        reshard_after_forward=stage is None and options.pg_collection.data_mesh("dense").size(-1) > 1,
    )
    model.materialize(device, config.train.seed)
    return model


def _require_names_of_their_own(chunks: Sequence[ModelModule]) -> None:
    """Raises ConfigError for a parameter that two chunks of this rank have, unless one has it as a declared copy."""
    copied = {id(weight) for chunk in chunks for weight in chunk.copied_weights()}
    chunk_of: dict[str, int] = {}
    for index, chunk in enumerate(chunks):
        names = [name for name, parameter, _ in declared_parameters(chunk) if id(parameter) not in copied]
        if twice := [name for name in names if name in chunk_of]:
            raise ConfigError(
                f"parameter {twice[0]} must be in one stage: weights are drawn, trained and saved by their names; "
                f"{type(chunk).__name__} has it in chunks {chunk_of[twice[0]]} and {index} of one rank; build it in "
                "one stage, or name it in shared_weights() of both, and in copied_weights() of the later one"
            )
        chunk_of |= dict.fromkeys(names, index)


def _recompute_named_(model: ModelModule, names: Sequence[str]) -> None:
    """Makes backward compute the operations ``names`` of every layer again. Raises ConfigError for one it has not."""
    named = model.recomputable()
    if missing := [name for name in names if name not in named]:
        raise ConfigError(
            f"train.recompute_modules names {', '.join(missing)}, and this {type(model).__name__} has none; "
            f"use {', '.join(named) or 'train.recompute=full or none'}"
        )
    modules = {module for name in names for module in named[name]}
    recompute_modules_(module for module in modules if not isinstance(module, DiscardableOutput))
    for layer in model.layers():
        if outputs := [each for each in layer.modules() if isinstance(each, DiscardableOutput) and each in modules]:
            discard_outputs_(layer, outputs)
