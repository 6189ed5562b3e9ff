"""Loads a trained model from a run's folder into one process, regardless of the layout that wrote it."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalith.config import RunConfig, TransformerConfig, valid_setting
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.samples import SizedSamples
from megalith.data.token_ids import check_dataset
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.fusions.core.preference import without_compiling
from megalith.observe.units import perplexity
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.inference_linear import inference_linear
from megalith.parallel.linear import linear
from megalith.parallel.parameters import refill_buffers_, state_tensors
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.storage import Store
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.build_model import DTYPES
from megalith.training.evaluation import evaluate
from megalith.training.kept import KEPT_TOKENIZER, kept_tokenizer
from megalith.training.process_group import choose_device
from megalith.training.run_folder import open_run
from megalith.training.state import read_class_names, read_train_state
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.finetune_classification import FinetuneClassification
from megalith.training.tasks.masked_task import MaskedTask
from megalith.training.tasks.task import AnyTask
from megalith.training.tasks.weights import load_weights
from megalith.transformer.module import ModelModule
from megalith.wording import counted

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
    """A model in evaluation mode, its training settings, and the step of its checkpoint."""

    model: ModelModule
    task: AnyTask
    config: RunConfig
    step: int
    device: torch.device
    options: BuildOptions


@dataclass(frozen=True)
class CheckpointLoss:
    """The loss of a checkpoint in nats, a mean over ``num_tokens`` tokens of ``dataset``.

    ``name``: the name of the validation set; "" if it has none. ``means``: of every loss term and measure, by name.
    ``counted``: what ``num_tokens`` counts, in the plural, if not tokens. ``classes``: see ``Evaluation``.
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
        """``observe.units.perplexity`` of the loss."""
        return perplexity(self.loss)


def load_model(
    source: str | Path | Store,
    task: AnyTask | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> TrainedModel:
    """Loads the model of a run's newest checkpoint, or of a checkpoint if ``source`` is one.

    Weights are verified, and cast to ``dtype``, by default the run's compute dtype. Pass ``task`` for a run that was
    trained with a custom task.

    Raises:
        CheckpointError: there is no checkpoint, config.yaml is missing, or the checkpoint is damaged.
    """
    checkpoint, folder, config = open_run(source)
    device = device or choose_device()
    fused_loss = config.train.fused_linear_cross_entropy  # includes the output projection
    options = BuildOptions(
        ProcessGroupCollection.single(),
        dtype or DTYPES[config.precision.dtype],
        matrix_product=linear if fused_loss else inference_linear,
        fused_linear_cross_entropy=fused_loss,
    )
    task = _task_of_run(checkpoint, folder, config) if task is None else task
    with torch.device("meta"):
        model = task.build_model(options)
    load_into_(model, checkpoint, device)
    return TrainedModel(model, task, config, read_train_state(checkpoint).step, device, options)


def load_into_(model: ModelModule, checkpoint: Store, device: torch.device) -> None:
    """Moves ``model``, built whole on meta, to ``device``, loads ``checkpoint`` into it, and sets evaluation mode.

    Raises CheckpointError as ``load_weights`` does.
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
    """Evaluates ``source`` on ``dataset``, by default on each set of the run's own ``data.valid``.

    Args:
        task: as in ``load_model``.
        progress: called with the number of samples done and the total, over all datasets.

    Raises:
        ConfigError: ``max_samples`` is below 1, or the classes of the dataset are not those of the model.
        DataError: the dataset cannot be read, was made with another tokenizer than the training data, has token ids
            beyond the model's vocabulary, or has no token with a loss.
        CheckpointError: the run has no held-out dataset, and none was given; or as ``load_model``.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"the number of samples must be 1 or more; got {max_samples}; leave it out to use all")
    checkpoint, folder, config = open_run(source)
    config = _skipping_long_conversations(config) if dataset else config
    prefixes = {"": dataset} if dataset else config.data.valid_sets
    if not prefixes:
        raise CheckpointError(f"{source} was trained without data.valid; give a dataset with --data PREFIX")
    task, built_in = (_task_of_run(checkpoint, folder, config), True) if task is None else (task, False)
    held_out: dict[str, SizedSamples[Any]] = {}
    for name, prefix in prefixes.items():
        try:
            if built_in:  # a custom task may read other data
                _check_fits(IndexedDataset(prefix), folder, config)
            held_out[name] = task.evaluation_dataset(prefix)
        except DataError as error:
            if dataset is not None:
                raise
            raise _of_own_data(error, name, source) from error
    trained = load_model(checkpoint, task)
    say_what_experts_drop(config.model, f"the {counted(config.train.micro_batch_size, 'sample')} of a micro-batch")
    sizes = [len(each) if max_samples is None else min(max_samples, len(each)) for each in held_out.values()]
    losses = []
    for number, (name, prefix) in enumerate(prefixes.items()):
        with without_compiling():  # compiling takes longer than it would save in one pass
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
            raise DataError(f"{prefix}: none of the tokens read has a loss, so nothing can be measured; use more text")
        measured = found.loss, found.num_tokens, trained.step, found.means, found.counted, found.classes
        losses.append(CheckpointLoss(name, prefix, *measured))
    return losses


def say_what_experts_drop(model: TransformerConfig, together: str) -> None:
    """Logs that experts drop tokens if they have a capacity; ``together`` names what is processed at a time."""
    if model.moe is not None and model.moe.capacity is not None:
        log.info(
            "experts drop tokens beyond their capacity, as in training (model.moe.capacity.factor=%s): the result "
            "depends on %s, whose tokens compete for capacity",
            model.moe.capacity.factor,
            together,
        )


def _task_of_run(checkpoint: Store, folder: Store, config: RunConfig) -> AnyTask:
    """Returns the built-in task with the tokenizer and the classes that the run keeps; its data may be gone."""
    task = task_of(config)
    if isinstance(task, MaskedTask):
        task.use_tokenizer_of(folder)
    if isinstance(task, FinetuneClassification):
        task.use_classes(read_class_names(checkpoint), str(checkpoint))
    return task


def _skipping_long_conversations(config: RunConfig) -> RunConfig:
    """Returns ``config`` to evaluate any dataset: what does not fit is skipped if the run has no setting for it."""
    if config.model.kind != "gpt" or config.data.long_conversations is not None:
        return config
    data = config.data.model_copy(update={"long_conversations": "skip"})
    return config.model_copy(update={"data": data})


def _of_own_data(error: DataError, name: str, source: str | Path) -> DataError:
    """Returns ``error`` as that of the validation set ``name`` in the settings of the run ``source``."""
    return DataError(f"{valid_setting(name)} of {source}: {error}; give other data with --data PREFIX")


def _progress_of_part(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _check_fits(dataset: IndexedDataset, folder: Store, config: RunConfig) -> None:
    """Raises DataError unless ``dataset`` matches the tokenizer and the vocabulary of the run in ``folder``."""
    assert config.model.vocab_size is not None, "set in the config.yaml of a run"
    made_with = None if dataset.sidecar is None else dataset.sidecar.tokenizer_sha256
    trained_with = _tokenizer_sha256(folder, config)
    if made_with is None or trained_with is None:
        which = dataset.prefix if made_with is None else folder
        log.warning("%s does not record its tokenizer, so only the token ids are checked", which)
    elif made_with != trained_with:
        path = folder / KEPT_TOKENIZER if KEPT_TOKENIZER in folder.names() else "PATH"
        raise DataError(
            f"{dataset.prefix} was made with a different tokenizer than the training data of {folder}; prepare the "
            f"text again with that one: megalith data prepare FILES... --out PREFIX --tokenizer {path}"
        )
    found = check_dataset(dataset, config.model.vocab_size)
    if found.problem is not None:
        raise DataError(found.problem)
    if found.scanned is not None:
        log.info("%s", found.scanned)


def _tokenizer_sha256(folder: Store, config: RunConfig) -> str | None:
    """Returns the digest of the run's tokenizer, or None if it is unknown. Raises DataError if it is damaged."""
    if (kept := kept_tokenizer(folder)) is not None:
        return kept.sha256
    for prefix in config.data.train_sets.values():  # none if the model was imported without a tokenizer
        with suppress(DataError):
            sidecar = IndexedDataset(prefix).sidecar
            if sidecar is not None and sidecar.tokenizer_sha256 is not None:
                return sidecar.tokenizer_sha256
    return None
