"""A trained model from a run's folder: loaded whole into one process, whatever layout wrote it."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.checkpoint.folders import find_checkpoint
from megalith.checkpoint.load import load_tensors, read_state
from megalith.config import RunConfig, load_run
from megalith.errors import CheckpointError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import refill_buffers_, state_tensors
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.evaluation import evaluate
from megalith.training.process_group import choose_device
from megalith.training.setup import DTYPES
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule

__all__ = ["CheckpointLoss", "TrainedModel", "evaluate_checkpoint", "load_model"]


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, the settings that it was trained with, and the step it is of."""

    model: ModelModule
    task: AnyTask
    config: RunConfig
    step: int
    device: torch.device


@dataclass(frozen=True)
class CheckpointLoss:
    """loss: nats per token, the mean over ``num_tokens`` tokens of ``dataset``."""

    dataset: str
    loss: float
    num_tokens: int
    step: int

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def load_model(source: str | Path) -> TrainedModel:
    """The model of a run's newest checkpoint, or of the checkpoint that ``source`` is.

    Weights are verified, and cast to the dtype that the run computed in.

    Raises:
        CheckpointError: there is no checkpoint, no config.yaml beside it, or it is damaged.
    """
    path = _checkpoint(Path(source))
    config_file = path.parent.parent / "config.yaml"
    if not config_file.exists():
        raise CheckpointError(
            f"{config_file} is missing, which says what model {path} holds; keep it with its checkpoints"
        )
    config = load_run(config_file)
    device = choose_device()
    dtype = DTYPES[config.precision.dtype]
    task = task_of(config)
    with torch.device("meta"):
        model = task.build_model(BuildOptions(ProcessGroupCollection.single(), dtype))
    model.to_empty(device=device)
    refill_buffers_(model)
    weights = {name: tensor.detach() for name, tensor in state_tensors(model).items()}
    load_tensors(path, weights, only=lambda name: not name.startswith("optimizer."), cast=True)
    return TrainedModel(model.eval(), task, config, read_state(path)["train"]["step"], device)


def evaluate_checkpoint(source: str | Path, dataset: str | None, max_samples: int | None) -> CheckpointLoss:
    """The loss of ``source`` on ``dataset``, by default the run's own ``data.valid``.

    Raises:
        CheckpointError: the run has no held-out dataset, and none was given; or as ``load_model``.
    """
    trained = load_model(source)
    prefix = dataset or trained.config.data.valid
    if prefix is None:
        raise CheckpointError(f"{source} was trained without data.valid; name a dataset with --data PREFIX")
    found = evaluate(
        trained.task,
        [trained.model],
        trained.task.evaluation_dataset(prefix),
        trained.config.train.micro_batch_size,
        pg_collection=ProcessGroupCollection.single(),
        device=trained.device,
        max_samples=max_samples,
    )
    return CheckpointLoss(prefix, found.loss, found.num_tokens, trained.step)


def _checkpoint(source: Path) -> Path:
    if (source / "manifest.json").exists():
        return source
    found = find_checkpoint(source / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{source} is neither a run with a complete checkpoint nor a checkpoint; give one of them"
        )
    return found
