"""A trained model from a run's folder: loaded whole into one process, whatever layout wrote it."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.checkpoint.folders import find_checkpoint
from megalith.checkpoint.load import load_tensors
from megalith.config import RunConfig, load_run
from megalith.config.yaml_text import MOST_BYTES, read_yaml
from megalith.errors import CheckpointError, ConfigError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import refill_buffers_, state_tensors
from megalith.storage import MANIFEST, Store, open_store
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.evaluation import evaluate
from megalith.training.process_group import choose_device
from megalith.training.setup import DTYPES
from megalith.training.state import read_saved_state
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


def load_model(source: str | Path, task: AnyTask | None = None) -> TrainedModel:
    """The model of a run's newest checkpoint, or of the checkpoint that ``source`` is.

    Weights are verified, and cast to the dtype that the run computed in. ``task`` is that of a run with a user's own.

    Raises:
        CheckpointError: there is no checkpoint, no config.yaml beside it, or it is damaged.
    """
    checkpoint = _checkpoint(open_store(source))
    run = checkpoint.split()[0].split()[0]
    if "config.yaml" not in run.names():
        raise CheckpointError(
            f"{run}/config.yaml is missing, which says what model {checkpoint} holds; keep it with its checkpoints"
        )
    config = _settings_of(run)
    device = choose_device()
    dtype = DTYPES[config.precision.dtype]
    task = task_of(config) if task is None else task
    with torch.device("meta"):
        model = task.build_model(BuildOptions(ProcessGroupCollection.single(), dtype))
    model.to_empty(device=device)
    refill_buffers_(model)
    weights = {name: tensor.detach() for name, tensor in state_tensors(model).items()}
    load_tensors(checkpoint, weights, only=lambda name: not name.startswith("optimizer."), cast=True)
    return TrainedModel(model.eval(), task, config, read_saved_state(checkpoint).train.step, device)


def evaluate_checkpoint(
    source: str | Path, dataset: str | None, max_samples: int | None, task: AnyTask | None = None
) -> CheckpointLoss:
    """The loss of ``source`` on ``dataset``, by default the run's own ``data.valid``; ``task`` as in ``load_model``.

    Raises:
        CheckpointError: the run has no held-out dataset, and none was given; or as ``load_model``.
    """
    trained = load_model(source, task)
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


def _settings_of(run: Store) -> RunConfig:
    """The settings that the run in the folder ``run`` was trained with."""
    path = f"{run}/config.yaml"
    content = run.read("config.yaml", 0, min(run.size("config.yaml"), MOST_BYTES + 1))
    try:
        tree = read_yaml(content, path)
        if not isinstance(tree, dict):
            raise ConfigError(f"it must hold groups of settings (model:, data:, train:, ...); it holds {tree!r:.80}")
        return load_run(tree)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} does not say what model is in its checkpoints: {error}; copy it again from where it was trained"
        ) from error


def _checkpoint(source: Store) -> Store:
    if MANIFEST in source.names():
        return source
    found = find_checkpoint(source / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{source} is neither a run with a complete checkpoint nor a checkpoint; give one of them"
        )
    return found
