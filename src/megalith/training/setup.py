"""From a resolved config to a run that can take its first step."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from megalith.acceleration.recompute import recompute_modules_
from megalith.config import RunConfig
from megalith.config.experimental import require
from megalith.data.loader import StepLoader
from megalith.errors import ConfigError
from megalith.observe.device_clock import DeviceClock
from megalith.observe.timers import Timers
from megalith.optim.build import build_optimizer
from megalith.optim.loss_scale import DynamicLossScale
from megalith.optim.optimizer import BuildOptimizer
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.parallel.build_options import BuildOptions, MatrixProduct
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.parameters import declared_parameters
from megalith.parallel.sharding.fsdp import shard_model
from megalith.storage import Store, open_store
from megalith.topology.agreement import agreed
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.torch_compat import compile_layers_
from megalith.training.batch import collate_for
from megalith.training.continuity import data_identity
from megalith.training.loop import Callback
from megalith.training.num_microbatches_calculator import build_num_microbatches_calculator
from megalith.training.run import Run
from megalith.training.state import TrainState
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule

__all__ = ["DTYPES", "RunParts", "build_run", "param_dtype", "set_determinism"]

# precision.dtype -> the dtype of the computation
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class RunParts:
    """What a run is made of besides its settings; each may be a user's own.

    Attributes:
        task: what is learned; None: what the settings ask for.
        optimizer_of: builds the optimizer; by default that of ``optim.name``.
        matrix_product: of every linear layer.
        checkpoints: the folder for checkpoints; None: ``checkpoints`` in the run's folder.
        callbacks: called around steps after those of the run itself, on every rank.
    """

    task: AnyTask | None = None
    optimizer_of: BuildOptimizer = build_optimizer
    matrix_product: MatrixProduct = linear
    checkpoints: Path | Store | None = None
    callbacks: tuple[Callback, ...] = ()


def build_run(config: RunConfig, device: torch.device, parts: RunParts | None = None) -> Run:
    """Everything of a run, at step 0, with freshly drawn weights. Needs the default process group."""
    parts = parts or RunParts()
    set_determinism(config.train.deterministic)
    task = task_of(config) if parts.task is None else parts.task
    pg_collection = _pg_collection(config, device)
    parallel = config.parallel
    method = ContextMethod(parallel.context_method, parallel.context_inner or 1)
    options = BuildOptions(pg_collection, param_dtype(config), parallel.sequence, parts.matrix_product, method)
    chunks = [_build_model(config, task, options, device)]
    with agreed("the training data cannot be read"):
        dataset = task.train_dataset()
    identity = data_identity(task, dataset)
    named = ((name, parameter) for name, parameter, _ in declared_parameters(*chunks))
    optimizer = parts.optimizer_of(named, config.optim)
    return Run(
        config=config,
        task=task,
        device=device,
        pg_collection=pg_collection,
        chunks=chunks,
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


def param_dtype(config: RunConfig) -> torch.dtype:
    """What parameters, gradients and the optimizer's state are kept in: float32, or wider for a wider computation."""
    return torch.promote_types(DTYPES[config.precision.dtype], torch.float32)


def set_determinism(deterministic: bool) -> None:
    """Makes torch refuse operations whose result may change from run to run, or lets it choose the fastest again."""
    if deterministic:
        # read by cuBLAS when its first handle is made, and needed by torch's own check
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # fills of fresh memory find code that reads what it has not written: worth their cost in tests alone
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)


def _pg_collection(config: RunConfig, device: torch.device) -> ProcessGroupCollection:
    layout = config.parallel.layout(dist.get_world_size())
    return ParallelState(RankGrid(layout), device_type=device.type).collection()


def _build_model(config: RunConfig, task: AnyTask, options: BuildOptions, device: torch.device) -> ModelModule:
    """The model on meta; recomputation, compilation and sharding applied to it; and then its memory and weights."""
    with torch.device("meta"):
        model = task.build_model(options)
    if config.train.recompute == "full":
        recompute_modules_(model.layers())
    elif config.train.recompute == "selective":
        recompute_modules_(_attention_cores(model))
    if config.train.compile:
        require("compile", config)
        compile_layers_(model.layers())
    shard_model(
        model,
        model.fsdp_units(),
        options.pg_collection,
        compute_dtype=DTYPES[config.precision.dtype],
        param_dtype=options.dtype,
        reshard_after_forward=options.pg_collection.data_mesh("dense").size(-1) > 1,
    )
    model.materialize(device, config.train.seed)
    return model


def _attention_cores(model: ModelModule) -> list[nn.Module]:
    if not (cores := model.attention_cores()):
        raise ConfigError(
            f"train.recompute=selective recomputes the attention cores (DotProductAttention), and this "
            f"{type(model).__name__} has none; use train.recompute=full or none"
        )
    return cores


def _loss_scale(config: RunConfig) -> DynamicLossScale | None:
    scale = config.precision.loss_scale
    if scale is None:
        return None
    return DynamicLossScale(scale.initial, scale.window, scale.hysteresis, scale.minimum)
