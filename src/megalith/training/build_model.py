"""Builds this rank's part of a task's model: split into stages, recomputed, compiled, sharded and initialized."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megalith.acceleration.fp8_utils import BlockwiseProduct, why_not_fp8
from megalith.acceleration.recompute import DiscardableOutput, discard_outputs_, recompute_modules_
from megalith.config import RunConfig
from megalith.config.experimental import require
from megalith.errors import ConfigError
from megalith.parallel.build_options import BuildOptions, LayerProduct, MatrixProduct
from megalith.parallel.linear import linear
from megalith.parallel.parameters import declared_parameters
from megalith.parallel.pipeline.links import open_links
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.schedules import placement_of
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.parallel.pipeline.stages import balanced_stages, listed_stages
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.agreement import agreed, all_gather, everywhere
from megalith.topology.rank_groups import ParallelState
from megalith.torch_compat.compiler import compile_layers_
from megalith.training.tasks.task import AnyTask, Task
from megalith.transformer.module import ModelModule
from megalith.transformer.stage import Stage

__all__ = [
    "DTYPES",
    "build_pipeline",
    "check_products",
    "layer_product",
    "param_dtype",
    "placement_of_run",
    "recompute_",
    "stages_of",
]

# precision.dtype -> compute dtype
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def param_dtype(config: RunConfig) -> torch.dtype:
    """Returns the dtype of parameters, gradients and optimizer state: float32, or the compute dtype if wider."""
    return torch.promote_types(DTYPES[config.precision.dtype], torch.float32)


def check_products(config: RunConfig, device: torch.device) -> None:
    """Raises ConfigError if the run trains in FP8 and ``device`` cannot."""
    fp8 = config.precision.fp8
    if fp8 is not None and (reason := why_not_fp8(device, DTYPES[config.precision.dtype])):
        raise ConfigError(
            f"precision.fp8.recipe={fp8.recipe} cannot run here: {reason}; remove precision.fp8, and fp8 from "
            "`experimental`"
        )


def layer_product(config: RunConfig, plain: MatrixProduct = linear) -> LayerProduct | None:
    """Returns what chooses the matrix product of a layer: in FP8, or ``plain`` in layers that stay in precision.dtype.

    None if all layers take the model's. Raises ExperimentalError unless the feature is enabled.
    """
    fp8 = config.precision.fp8
    if fp8 is None:
        return None
    require("fp8", config)
    in_8_bits = BlockwiseProduct(wgrad=fp8.wgrad)
    first, num_last = fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16
    return lambda index, num_layers: in_8_bits if first <= index < num_layers - num_last else plain


def build_pipeline(
    config: RunConfig, task: AnyTask, options: BuildOptions, state: ParallelState, device: torch.device
) -> Pipeline[ModelModule]:
    """Builds this rank's chunks of the model, with links to the ranks of the other stages. Called on all ranks.

    Raises:
        ConfigError: the model of ``task`` cannot be split into the requested stages.
    """
    placement, rank = placement_of_run(config), state.rank("pp")
    with agreed():  # either all ranks open the links or none does
        stages = [None] if placement.num_stages == 1 else stages_of(config, task)
        held = [placement.stage(rank, chunk) for chunk in range(placement.num_chunks)]
        chunks = [_on_meta(task, options, stages[number]) for number in held]
    if placement.num_stages > 1:
        _require_names_of_their_own(chunks, held, options)
    _require_recomputed_modules(config, chunks, options)
    with agreed():
        for chunk in chunks:
            _make_real_(chunk, config, options, device, whole=placement.num_stages == 1)
    if placement.num_stages == 1:
        return Pipeline(chunks)
    shared, copies = _shared_weights(chunks, state, options)
    links = open_links(placement, state, task.hidden_dtype(DTYPES[config.precision.dtype]), device)
    split_product = options.matrix_product if isinstance(options.matrix_product, SplitProduct) else None
    return Pipeline(chunks, placement, config.parallel.schedule, links, split_product, shared=shared, copies=copies)


def placement_of_run(config: RunConfig) -> Placement:
    """Returns which rank holds which stage of the run's pipeline."""
    return placement_of(config.parallel.schedule, config.parallel.pipeline, config.parallel.virtual)


def recompute_(model: ModelModule, config: RunConfig) -> None:
    """Applies the run's activation recomputation settings to ``model``."""
    if config.train.recompute == "full":
        recompute_modules_(model.layers())
    elif config.train.recompute == "selective":
        _recompute_named_(model, config.train.recompute_modules)


def stages_of(config: RunConfig, task: AnyTask) -> list[Stage]:
    """Returns the layers of each stage of the run's pipeline. Raises ConfigError if the model cannot be split."""
    parallel, costs = config.parallel, task.costs()
    if type(task).hidden_shape is Task.hidden_shape:
        raise ConfigError(
            f"{type(task).__name__} defines costs() but not hidden_shape(), the shape that a stage receives from the "
            "previous one; define it, or use parallel.pipeline=1"
        )
    num_stages, listed = parallel.pipeline * parallel.virtual, parallel.stage_layers
    ranges = balanced_stages(costs, num_stages) if listed is None else listed_stages(listed)
    return [
        Stage(layers.start, layers.stop, has_embedding=number == 0, has_head=number == num_stages - 1)
        for number, layers in enumerate(ranges)
    ]


def _on_meta(task: AnyTask, options: BuildOptions, stage: Stage | None) -> ModelModule:
    """Builds a stage of the model, or all of it if None, on the meta device."""
    with torch.device("meta"):
        return task.build_model(options) if stage is None else task.build_model(options, stage)


def _make_real_(
    model: ModelModule, config: RunConfig, options: BuildOptions, device: torch.device, *, whole: bool
) -> None:
    """Applies recomputation, compilation and sharding to a model on meta, then allocates and initializes it.

    ``whole``: the model is not split into stages.
    """
    recompute_(model, config)
    if config.train.compile:
        require("compile", config)
        compile_layers_(model.layers())
    shard_model(
        model,
        model.fsdp_units(),
        options.pg_collection,
        compute_dtype=DTYPES[config.precision.dtype],
        param_dtype=options.dtype,
        # a pipeline stage needs its weights again soon, for the next micro-batch
        reshard_after_forward=whole and options.pg_collection.data_mesh("dense").size(-1) > 1,
    )
    model.materialize(device, config.train.seed)


def _require_names_of_their_own(chunks: Sequence[ModelModule], stages: Sequence[int], options: BuildOptions) -> None:
    """Raises ConfigError if two stages have the same parameter, unless one of them declares it as a copy.

    ``stages``: the stage numbers of this rank's chunks. Called on all ranks; gathers names over pp.
    """
    names_of: dict[int, list[str]] = {}
    for stage, chunk in zip(stages, chunks, strict=True):
        copied = {id(weight) for weight in chunk.copied_weights()}
        names_of[stage] = [name for name, parameter, _ in declared_parameters(chunk) if id(parameter) not in copied]
    gathered = all_gather(names_of, options.pg_collection.pp)
    with agreed():
        stage_of: dict[str, int] = {}
        for stage, names in sorted(item for of_rank in gathered for item in of_rank.items()):
            if twice := [name for name in names if name in stage_of]:
                raise ConfigError(
                    f"parameter {twice[0]} must be in one stage: weights are initialized, trained and saved by name; "
                    f"{type(chunks[0]).__name__} has it in stages {stage_of[twice[0]]} and {stage}; build it in one "
                    "stage, or list it in shared_weights() of both and in copied_weights() of the later one"
                )
            stage_of |= dict.fromkeys(names, stage)


def _shared_weights(
    chunks: Sequence[ModelModule], state: ParallelState, options: BuildOptions
) -> tuple[list[tuple[nn.Parameter, ProcessGroup]], list[tuple[nn.Parameter, nn.Parameter]]]:
    """Returns the ``shared`` and ``copies`` arguments of a ``Pipeline`` of ``chunks``, matched by name.

    Called on all ranks of the pipeline.
    """
    originals: dict[str, nn.Parameter] = {}
    copies: list[tuple[nn.Parameter, nn.Parameter]] = []
    for chunk in chunks:
        among = {id(weight) for weight in chunk.shared_weights()}
        for name, parameter, _ in declared_parameters(chunk):
            if id(parameter) in among and name in originals:
                copies.append((originals[name], parameter))
            elif id(parameter) in among:
                originals[name] = parameter
    gathered = all_gather(list(originals), options.pg_collection.pp)
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    shared: list[tuple[nn.Parameter, ProcessGroup]] = []
    for name in sorted(originals):  # the same order on all ranks, so that their collectives match
        holding = tuple(rank for rank, names in zip(state.ranks("pp"), gathered, strict=True) if name in names)
        if len(holding) > 1:
            if holding not in groups:
                groups[holding] = state.another_group(holding, "embd")
            shared.append((originals[name], groups[holding]))
    return shared, copies


def _require_recomputed_modules(config: RunConfig, chunks: Sequence[ModelModule], options: BuildOptions) -> None:
    """Raises ConfigError for a name in ``train.recompute_modules`` that no stage of the model has.

    Called on all ranks; gathers names over pp, because a stage may lack modules that another has, such as experts.
    """
    if config.train.recompute != "selective":
        return
    here, pp_group = [name for chunk in chunks for name in chunk.recomputable()], options.pg_collection.pp
    gathered = [here] if pp_group is None else all_gather(here, pp_group)
    named = list(dict.fromkeys(name for of_rank in gathered for name in of_rank))
    if missing := [name for name in config.train.recompute_modules if name not in named]:
        raise everywhere(
            ConfigError(
                f"train.recompute_modules lists {', '.join(missing)}, but this {type(chunks[0]).__name__} has none; "
                f"use {', '.join(named) or 'train.recompute=full or none'}"
            )
        )


def _recompute_named_(model: ModelModule, names: Sequence[str]) -> None:
    """Makes the backward recompute the operations ``names`` in every layer that has them."""
    named = model.recomputable()
    modules = {module for name in names for module in named.get(name, ())}
    recompute_modules_(module for module in modules if not isinstance(module, DiscardableOutput))
    for layer in model.layers():
        if outputs := [each for each in layer.modules() if isinstance(each, DiscardableOutput) and each in modules]:
            discard_outputs_(layer, outputs)
