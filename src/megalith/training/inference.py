"""A trained model from a run's folder: loaded whole into one process, whatever layout wrote it."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.checkpoint.folders import find_checkpoint
from megalith.checkpoint.load import load_tensors, read_state
from megalith.config import RunConfig, load_run
from megalith.data.gpt_dataset import EvaluationDataset
from megalith.errors import CheckpointError
from megalith.models.generation import Sampling, generate
from megalith.models.gpt_model import GPTModel
from megalith.parallel.parameters import declared_parameters
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.batch import InputMaker
from megalith.training.evaluation import evaluate
from megalith.training.preflight import load_tokenizer
from megalith.training.process_group import choose_device
from megalith.training.setup import DTYPES
from megalith.transformer.build_options import BuildOptions

__all__ = ["CheckpointLoss", "TrainedModel", "evaluate_checkpoint", "generate_text", "load_model"]


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, the settings that it was trained with, and the step it is of."""

    model: GPTModel
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
    with torch.device("meta"):
        model = GPTModel(config.model, BuildOptions(ProcessGroupCollection.single(), dtype))
    model.to_empty(device=device)
    weights = {name: parameter.detach() for name, parameter, _ in declared_parameters(model)}
    load_tensors(path, weights, only=lambda name: not name.startswith("optimizer."), cast=True)
    return TrainedModel(model.eval(), config, read_state(path)["train"]["step"], device)


def evaluate_checkpoint(source: str | Path, dataset: str | None, max_samples: int | None) -> CheckpointLoss:
    """The loss of ``source`` on ``dataset``, by default the run's own ``data.valid``.

    Raises:
        CheckpointError: the run has no held-out dataset, and none was given; or as ``load_model``.
    """
    trained = load_model(source)
    prefix = dataset or trained.config.data.valid
    if prefix is None:
        raise CheckpointError(f"{source} was trained without data.valid; name a dataset with --data PREFIX")
    data = trained.config.data
    found = evaluate(
        trained.model,
        EvaluationDataset(prefix, data.seq_length, mask_eod=data.eod_mask_loss),
        InputMaker(trained.config, trained.device),
        trained.config.train.micro_batch_size,
        max_samples=max_samples,
    )
    return CheckpointLoss(prefix, found.loss, found.num_tokens, trained.step)


def generate_text(source: str | Path, prompt: str, max_new_tokens: int, *, sampling: Sampling, seed: int) -> str:
    """What the model of ``source`` adds to ``prompt``. Raises as ``load_model`` and ``generate`` do."""
    trained = load_model(source)
    tokenizer = load_tokenizer(trained.config)
    tokens = generate(
        trained.model,
        tokenizer.encode(prompt),
        max_new_tokens,
        sampling=sampling,
        seed=seed,
        end_token=tokenizer.eod,
    )
    return tokenizer.decode(tokens)


def _checkpoint(source: Path) -> Path:
    if (source / "manifest.json").exists():
        return source
    found = find_checkpoint(source / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{source} is neither a run with a complete checkpoint nor a checkpoint; give one of them"
        )
    return found
