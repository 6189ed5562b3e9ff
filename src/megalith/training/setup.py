"""Builds a run that is ready for its first step from a resolved config."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megalith.config import RunConfig
from megalith.config.experimental import require
from megalith.data.loader import StepLoader
from megalith.errors import ConfigError
from megalith.observe.device_clock import DeviceClock
from megalith.observe.timers import Timers
from megalith.optim.build import build_optimizer
from megalith.optim.loss_scale import DynamicLossScale
from megalith.optim.optimizer import BuildOptimizer, Optimizer, matches
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.optim.rate_factors import multiply_rates_
from megalith.optional import need
from megalith.parallel.build_options import BuildOptions, MatrixProduct
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.expert.fused_a2a import FusedA2A, deep_ep_buffer
from megalith.parallel.expert.symmetric_a2a import SymmetricA2A, nvshmem_memory
from megalith.parallel.linear import is_plain, linear
from megalith.parallel.parameters import declared_parameters
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.schedules import splits_backward
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.storage import Store, open_store
from megalith.topology.agreement import agreed, all_gather
from megalith.topology.inbox import poison_buffers
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.training.batch import collate_for
from megalith.training.build_model import build_pipeline, check_products, layer_product, param_dtype, placement_of_run
from megalith.training.continuity import check_ranks_have_one_recipe, data_identity
from megalith.training.exchange_sizes import dispatched_size, symmetric_sizes
from megalith.training.loop import Callback
from megalith.training.num_microbatches_calculator import build_num_microbatches_calculator
from megalith.training.run import Run
from megalith.training.state import TrainState
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule
from megalith.transformer.mup import rate_factors

__all__ = ["RunParts", "build_run", "set_determinism"]


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that are not settings; users can replace any of them.

    Attributes:
        task: what the model learns; None: the task that the settings select.
        optimizer_of: builds the optimizer; by default the one named by ``optim.name``.
        matrix_product: used by every linear layer; schedules that split the backward bring their own.
        checkpoints: the folder for checkpoints; None: ``checkpoints`` in the run's folder.
        callbacks: called around steps, after the run's own callbacks, on every rank.
    """

    task: AnyTask | None = None
    optimizer_of: BuildOptimizer = build_optimizer
    matrix_product: MatrixProduct = linear
    checkpoints: Path | Store | None = None
    callbacks: tuple[Callback, ...] = ()


def build_run(config: RunConfig, device: torch.device, parts: RunParts | None = None) -> Run:
    """Builds a run at step 0 with freshly initialized weights. Requires the default process group.

    Raises:
        ConfigError: on every rank, if settings differ between ranks, if the run trains in FP8 and ``device`` cannot, if
            a custom matrix product is combined with FP8 or with a schedule that splits the backward, or if the task,
            the model or the optimizer rejects the settings.
    """
    parts = parts or RunParts()
    check_ranks_have_one_recipe(config)
    check_products(config, device)
    product = _matrix_product(config, parts)
    # torch fills uninitialized memory only in deterministic mode
    set_determinism(config.train.deterministic or config.train.poison_buffers)
    poison_buffers(config.train.poison_buffers)
    task = task_of(config) if parts.task is None else parts.task
    state = _parallel_state(config, device)
    placement, parallel = placement_of_run(config), config.parallel
    pg_collection = state.collection(output_rank=placement.place(placement.num_stages - 1)[0])
    method = ContextMethod(parallel.context_method, parallel.context_inner or 1)
    options = BuildOptions(
        pg_collection,
        param_dtype(config),
        parallel.sequence,
        product,
        method,
        config.train.fused_linear_cross_entropy,
        parallel.dispatch,
        _fused_a2a(config, pg_collection),
        _symmetric_a2a(config, pg_collection, device),
        layer_product(config, product),
    )
    pipeline = build_pipeline(config, task, options, state, device)
    with agreed("the training data cannot be used"):
        dataset = task.train_dataset()
    identity = data_identity(task, dataset)
    optimizer = _optimizer(config, parts.optimizer_of, pipeline)
    return Run(
        config=config,
        task=task,
        device=device,
        options=options,
        pipeline=pipeline,
        optimizer=optimizer,
        scheduler=OptimizerParamScheduler.from_config(optimizer, config.optim, config.train.steps),
        loss_scale=_loss_scale(config),
        microbatches=build_num_microbatches_calculator(config, pg_collection.size("dp")),
        loader=StepLoader(
            dataset, collate_for(task, pg_collection), pg_collection.rank("dp"), pg_collection.size("dp")
        ),
        timers=Timers(DeviceClock() if device.type == "cuda" else None),
        state=TrainState(),
        checkpoints=open_store(parts.checkpoints or Path(config.run) / "checkpoints"),
        data_identity=identity,
    )


def set_determinism(deterministic: bool) -> None:
    """Makes torch reject nondeterministic operations, or lets it choose the fastest ones again."""
    if deterministic:
        # cuBLAS reads it when it creates its first handle, and torch checks that it is set
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def _fused_a2a(config: RunConfig, pg_collection: ProcessGroupCollection) -> FusedA2A | None:
    """Returns DeepEP's all-to-all if the run uses it. Raises MissingDependencyError on every rank if it is missing."""
    if config.parallel.dispatch.method != "flex" or pg_collection.ep is None:
        return None
    require("deep_ep", config)
    with agreed():
        need("deep_ep")
    # this connects the ranks of ep to each other
    num_bytes = dispatched_size(config) * torch.bfloat16.itemsize
    return FusedA2A(pg_collection.ep, deep_ep_buffer(pg_collection.ep, num_bytes))


def _symmetric_a2a(
    config: RunConfig, pg_collection: ProcessGroupCollection, device: torch.device
) -> SymmetricA2A | None:
    """Returns the all-to-all through symmetric memory, sized for one micro-batch, if the run uses it.

    Raises ConfigError or MissingDependencyError, on every rank, if such memory is unavailable or too small.
    """
    sizes = symmetric_sizes(config)
    if sizes is None or pg_collection.ep is None:
        return None
    require("symmetric_memory", config)
    with agreed():
        memory = nvshmem_memory(pg_collection.ep, device)
    return SymmetricA2A(memory, sizes)


def _matrix_product(config: RunConfig, parts: RunParts) -> MatrixProduct:
    schedule, fp8 = config.parallel.schedule, config.precision.fp8
    if fp8 is not None and not is_plain(parts.matrix_product):
        raise ConfigError(
            f"precision.fp8.recipe={fp8.recipe} and RunParts(matrix_product=...) both choose the product of linear "
            "layers; use only one of the two"
        )
    if not splits_backward(schedule):
        return parts.matrix_product
    if not is_plain(parts.matrix_product):
        raise ConfigError(
            f"parallel.schedule={schedule} computes the weight gradients of linear layers separately from their input "
            "gradients, with its own matrix product, but RunParts(matrix_product=...) gives another; leave it out, "
            "or use a schedule that does not split the backward: 1f1b, gpipe or interleaved"
        )
    return SplitProduct()


def _parallel_state(config: RunConfig, device: torch.device) -> ParallelState:
    layout = config.parallel.layout(dist.get_world_size())
    return ParallelState(RankGrid(layout), device_type=device.type)


def _optimizer(config: RunConfig, build: BuildOptimizer, pipeline: Pipeline[ModelModule]) -> Optimizer:
    """Builds the optimizer for this rank's parameters, with the overrides that match some of them.

    Raises ConfigError, on every rank, for overrides that match no parameter of any stage or that contradict each other.
    """
    named = [(name, parameter) for name, parameter, _ in declared_parameters(*pipeline.chunks)]
    with agreed():
        here = {override.match: matches(override, named) for override in config.optim.overrides}
    elsewhere = {match for found in all_gather(here) for match, matched in found.items() if matched}
    kept = tuple(
        override for override in config.optim.overrides if here[override.match] or override.match not in elsewhere
    )
    with agreed():
        optimizer = build(named, config.optim.model_copy(update={"overrides": kept}))
    if config.model.mup is not None:
        multiply_rates_(optimizer, rate_factors(declared_parameters(*pipeline.chunks), config.model), config.optim)
    return optimizer


def _loss_scale(config: RunConfig) -> DynamicLossScale | None:
    scale = config.precision.loss_scale
    if scale is None:
        return None
    return DynamicLossScale(scale.initial, scale.window, scale.hysteresis, scale.minimum)
