"""A trained model from a run's folder: loaded whole into one process, whatever layout wrote it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from megalith.config import RunConfig, TransformerConfig, valid_setting
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.samples import SizedSamples
from megalith.data.token_ids import check_dataset
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.fusions.core.preference import without_compiling
from megalith.observe.units import perplexity
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.inference_linear import inference_linear
from megalith.parallel.parameters import refill_buffers_, state_tensors
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.storage import Store
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.build_model import DTYPES
from megalith.training.evaluation import evaluate
from megalith.training.kept import KEPT_TOKENIZER, kept_tokenizer
from megalith.training.process_group import choose_device
from megalith.training.run_folder import open_run
from megalith.training.state import read_train_state
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.task import AnyTask
from megalith.training.tasks.weights import load_weights
from megalith.transformer.module import ModelModule

__all__ = [
    "CheckpointLoss",
    "TrainedModel",
    "evaluate_checkpoint",
    "load_into_",
    "load_model",
    "say_what_experts_drop",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, the settings that it was trained with, and the step it is of."""

    model: ModelModule
    task: AnyTask
    config: RunConfig
    step: int
    device: torch.device
    options: BuildOptions


@dataclass(frozen=True)
class CheckpointLoss:
    """loss: nats, the mean over ``num_tokens`` tokens of ``dataset``, or what ``counted`` says in the plural.

    ``name``: that of the validation set; "" of one without a name. ``means``: of every loss term and measure, by name.
    ``classes``: as in ``Evaluation``.
    """

    name: str
    dataset: str
    loss: float
    num_tokens: int
    step: int
    means: Mapping[str, float]
    counted: str
    classes: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        """As ``observe.units.perplexity`` of the loss."""
        return perplexity(self.loss)


def load_model(
    source: str | Path | Store,
    task: AnyTask | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> TrainedModel:
    """The model of a run's newest checkpoint, or of the checkpoint that ``source`` is.

    Weights are verified, and cast to ``dtype``, by default the one that the run computed in. ``task`` is that of a run
    with a user's own.

    Raises:
        CheckpointError: there is no checkpoint, no config.yaml beside it, or it is damaged.
    """
    checkpoint, _, config = open_run(source)
    device = device or choose_device()
    fused_loss = config.train.fused_linear_cross_entropy  # it computes the head's product itself
    options = BuildOptions(
        ProcessGroupCollection.single(),
        dtype or DTYPES[config.precision.dtype],
        matrix_product=linear if fused_loss else inference_linear,
        fused_linear_cross_entropy=fused_loss,
    )
    task = task_of(config) if task is None else task
    with torch.device("meta"):
        model = task.build_model(options)
    load_into_(model, checkpoint, device)
    return TrainedModel(model, task, config, read_train_state(checkpoint).step, device, options)


def load_into_(model: ModelModule, checkpoint: Store, device: torch.device) -> None:
    """Puts ``model``, built whole on meta, on ``device``, with the weights of ``checkpoint``, in evaluation mode.

    Raises CheckpointError as ``load_weights``.
    """
    model.to_empty(device=device)
    refill_buffers_(model)
    load_weights(checkpoint, {name: tensor.detach() for name, tensor in state_tensors(model).items()})
    model.eval()


def evaluate_checkpoint(
    source: str | Path,
    dataset: str | None,
    max_samples: int | None,
    task: AnyTask | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CheckpointLoss]:
    """The loss of ``source`` on ``dataset``, by default on each set of the run's own ``data.valid``.

    Args:
        task: as in ``load_model``.
        progress: told the samples done and how many there are, of all datasets together.

    Raises:
        ConfigError: ``max_samples`` is below 1.
        DataError: the dataset cannot be read, was made with another tokenizer than the training data, has token ids
            beyond the model's vocabulary, or has no token with a loss.
        CheckpointError: the run has no held-out dataset, and none was given; or as ``load_model``.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"the number of samples must be 1 or more; got {max_samples}; leave it out to take all")
    checkpoint, folder, config = open_run(source)
    prefixes = {"": dataset} if dataset else config.data.valid_sets
    if not prefixes:
        raise CheckpointError(f"{source} was trained without data.valid; name a dataset with --data PREFIX")
    held_out: dict[str, SizedSamples[Any]] = {}
    for name, prefix in prefixes.items():
        try:
            held_out[name] = (task or task_of(config)).evaluation_dataset(prefix)
            if task is None:  # what a user's own task reads is its own matter
                _check_fits(IndexedDataset(prefix), folder, config)
        except DataError as error:
            if dataset is not None:
                raise
            way_out = "name other data with --data PREFIX"
            raise DataError(f"{valid_setting(name)} of {source}: {error}; {way_out}") from error
    trained = load_model(checkpoint, task)
    say_what_experts_drop(config.model, f"the {config.train.micro_batch_size} samples of a micro-batch")
    sizes = [len(each) if max_samples is None else min(max_samples, len(each)) for each in held_out.values()]
    losses = []
    for number, (name, prefix) in enumerate(prefixes.items()):
        with without_compiling():  # a pass over held-out text does not repay it
            found = evaluate(
                trained.task,
                Pipeline([trained.model]),
                held_out[name],
                config.train.micro_batch_size,
                options=trained.options,
                device=trained.device,
                max_samples=max_samples,
                progress=partial(_progress_of_part, progress, sum(sizes[:number]), sum(sizes)),
            )
        if not found.num_tokens:
            raise DataError(f"{prefix}: no token that was read has a loss, and nothing can be measured; use more text")
        losses.append(
            CheckpointLoss(
                name, prefix, found.loss, found.num_tokens, trained.step, found.means, found.counted, found.classes
            )
        )
    return losses


def say_what_experts_drop(model: TransformerConfig, together: str) -> None:
    """Logs a line where experts have a capacity, which evaluation keeps; ``together``: what goes through at a time."""
    if model.moe is not None and model.moe.capacity is not None:
        log.info(
            "experts drop tokens past their capacity here as in training (model.moe.capacity.factor=%s): the result "
            "depends on %s, which compete for room",
            model.moe.capacity.factor,
            together,
        )


def _progress_of_part(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _check_fits(dataset: IndexedDataset, folder: Store, config: RunConfig) -> None:
    """Raises DataError unless ``dataset`` is of the tokenizer and the vocabulary of the run in ``folder``."""
    assert config.model.vocab_size is not None, "a run keeps its resolved settings"
    made_with = None if dataset.sidecar is None else dataset.sidecar.tokenizer_sha256
    trained_with = _tokenizer_sha256(folder, config)
    if made_with is None or trained_with is None:
        which = dataset.prefix if made_with is None else folder
        log.warning("%s does not say which tokenizer it is of, so that only its token ids are compared", which)
    elif made_with != trained_with:
        path = folder / KEPT_TOKENIZER if KEPT_TOKENIZER in folder.names() else "PATH"
        raise DataError(
            f"{dataset.prefix} was made with another tokenizer than the training data of {folder}; prepare the text "
            f"again with that one: megalith data prepare FILES... --out PREFIX --tokenizer {path}"
        )
    found = check_dataset(dataset, config.model.vocab_size)
    if found.problem is not None:
        raise DataError(found.problem)
    if found.scanned is not None:
        log.info("%s", found.scanned)


def _tokenizer_sha256(folder: Store, config: RunConfig) -> str | None:
    """The digest of the run's tokenizer; None where nothing is left that tells. Raises DataError if it is damaged."""
    if (kept := kept_tokenizer(folder)) is not None:
        return kept.sha256
    if config.data.train is None:  # imported, without a tokenizer
        return None
    try:
        sidecar = IndexedDataset(config.data.train).sidecar
    except DataError:
        return None
    return None if sidecar is None else sidecar.tokenizer_sha256
