"""From a resolved config to a run that can take its first step."""

import os

import torch
import torch.distributed as dist

from megalith.config import RunConfig
from megalith.config.experimental import require
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.loader import StepLoader
from megalith.models.gpt_model import GPTModel
from megalith.observe.timers import Timers
from megalith.optim.loss_scale import DynamicLossScale
from megalith.optim.optimizer import build_optimizer
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.parallel_state import ParallelState
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.training.batch import InputMaker
from megalith.training.num_microbatches_calculator import build_num_microbatches_calculator
from megalith.training.run import Run
from megalith.training.state import TrainState
from megalith.transformer.build_options import BuildOptions

__all__ = ["DTYPES", "build_run", "set_determinism"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_run(config: RunConfig, device: torch.device) -> Run:
    """Everything of a run, at step 0, with freshly drawn weights. Needs the default process group."""
    set_determinism(config.train.deterministic)
    pg_collection = _pg_collection(config, device)
    model = _build_model(config, pg_collection, device)
    optimizer = build_optimizer(model, config.optim)
    return Run(
        config=config,
        device=device,
        pg_collection=pg_collection,
        model=model,
        optimizer=optimizer,
        scheduler=OptimizerParamScheduler.from_config(optimizer, config.optim, config.train.steps),
        loss_scale=_loss_scale(config),
        microbatches=build_num_microbatches_calculator(config, pg_collection.dp_size),
        loader=_loader(config, pg_collection),
        make_inputs=InputMaker(config, device),
        clip_norm=config.optim.clip_norm,
        nonfinite=config.train.nonfinite,
        timers=Timers(torch.cuda.synchronize if device.type == "cuda" else None),
        state=TrainState(),
    )


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
    return ParallelState(RankGrid.of(layout), device_type=device.type).collection()


def _build_model(config: RunConfig, pg_collection: ProcessGroupCollection, device: torch.device) -> GPTModel:
    compute_dtype = DTYPES[config.precision.dtype]
    param_dtype = torch.promote_types(compute_dtype, torch.float32)
    options = BuildOptions(pg_collection, param_dtype, config.parallel.sequence, config.train.recompute)
    with torch.device("meta"):
        model = GPTModel(config.model, options)
    if config.train.compile:
        require("compile", config)
        for layer in model.model.layers:
            layer.compile()
    shard_model(
        model,
        model.model.layers,
        pg_collection,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        reshard_after_forward=pg_collection.dp_mesh.size(-1) > 1,
    )
    model.materialize(device, config.train.seed)
    return model


def _loss_scale(config: RunConfig) -> DynamicLossScale | None:
    scale = config.precision.loss_scale
    if scale is None:
        return None
    return DynamicLossScale(scale.initial, scale.window, scale.hysteresis, scale.minimum)


def _loader(config: RunConfig, pg_collection: ProcessGroupCollection) -> StepLoader:
    assert config.data.train is not None, "preflight refuses a run without data"
    dataset = GPTDataset(
        config.data.train, config.data.seq_length, config.train.seed, mask_eod=config.data.eod_mask_loss
    )
    return StepLoader(dataset, pg_collection.dp_rank, pg_collection.dp_size)
