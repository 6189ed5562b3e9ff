"""A task: what a run learns. The rest of ``training/`` knows no model, only this."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from megalith.config import MoEConfig
from megalith.config.layout import Layout
from megalith.data.samples import Identified, Samples, SizedSamples
from megalith.errors import ConfigError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.traffic import Traffic
from megalith.transformer.module import ModelModule
from megalith.transformer.stage import Stage
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["AnyTask", "StageTraffic", "Task", "TextSample", "TextWriter"]

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class StageTraffic:
    """What a stage of a model gives its ranks to exchange; a model that is not cut is one stage.

    Attributes:
        micro_batch: forward and backward of a micro-batch, over tensor and context, and over ranks that share experts.
        per_label: what comes to that with each token that is predicted, where only some are: so many collectives, whose
            bytes are those of one token.
        units: the weights of each of the model's ``fsdp_units``, and ``rest``: those in none.
        expert_units: which of the units are experts, by number.
        shared: those of which other stages have copies, by a name that all of these give it.
        hidden_bytes: of the hidden states that stages send each other.
    """

    micro_batch: Traffic
    units: Sequence[Sequence[Weight]]
    rest: Sequence[Weight]
    expert_units: frozenset[int] = frozenset()
    shared: Mapping[str, Weight] = field(default_factory=dict)
    per_label: Traffic = field(default_factory=Traffic)
    hidden_bytes: int = 0


@dataclass(frozen=True)
class TextSample:
    """What a model has added to a prompt."""

    prompt: str
    text: str


class TextWriter(Protocol):
    """Draws a text for each prompt of a run. All ranks call it together, and get the same texts."""

    def __call__(self, pipeline: Pipeline[Any]) -> list[TextSample]: ...


class Task(ABC, Generic[Sample, Batch, Inputs]):
    """The data, the model and the loss of a run.

    The loss of a step is the sum over ``terms`` of weight * (sum of the term) / (count of the term), sums and counts
    over the global batch. Counts are known before the first forward, so that gradients do not depend on how the batch
    was cut. What ``sums`` and ``counts`` have beside ``terms`` is measured in evaluation only: an accuracy, say.

    Attributes:
        terms: the weight of each loss term, by name; the first is what a run is about.
        tokens_per_sample: how many tokens a model reads of a sample, with a loss or without.
        flops_per_sample: model FLOPs of training on a sample, forward and backward, without what recomputation repeats.
        num_parameters: of the whole model.
        num_expert_parameters: of these, those of the experts that tokens are routed to.
        routed_layers: the layers with experts, in all stages, by their index.
        usual_labels: how many tokens a rank predicts of a micro-batch on average, where that depends on the text.
        in_brackets: what ``sample_as_text`` has in brackets.
        counted: what the first term is a mean over, in the plural.
    """

    counted: str = "tokens"
    in_brackets: str = "what no loss is taken on"
    terms: Mapping[str, float]
    tokens_per_sample: int
    flops_per_sample: int
    num_parameters: int
    num_expert_parameters: int = 0
    routed_layers: Mapping[int, MoEConfig] = MappingProxyType({})
    usual_labels: int | None = None

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """How many tokens each row has that a model reads of a sample; by default there is one row."""
        return (self.tokens_per_sample,)

    @abstractmethod
    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> ModelModule:
        """The model, on torch's current default device; ``stage`` of it where ``costs`` lets it be cut into stages."""

    def costs(self) -> ModelCosts:
        """What each part of the model costs, by which layers are dealt out to the stages of a pipeline.

        By default a ConfigError: not every model can be cut into stages.
        """
        raise ConfigError(f"the model of {type(self).__name__} cannot be cut into stages; use parallel.pipeline=1")

    def traffic(self, layout: Layout, stage: Stage | None = None) -> StageTraffic:
        """What ``stage``, by default the whole model, gives its ranks to exchange in training under ``layout``.

        By default a ConfigError: not every task counts it.
        """
        raise ConfigError(f"{type(self).__name__} does not count what its model exchanges; give it a traffic()")

    def hidden_shape(self, batch: Batch, options: BuildOptions) -> tuple[int, ...]:
        """The shape on this rank of what a stage gives the next for ``batch``; a task with ``costs`` needs it too."""
        raise NotImplementedError

    def hidden_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The dtype of what a stage gives the next, where the model computes in ``compute_dtype``; by default that."""
        return compute_dtype

    @abstractmethod
    def train_dataset(self) -> Samples[Sample]:
        """The samples to train on. Raises DataError if they cannot be read."""

    def data_identity(self, dataset: Samples[Sample]) -> Mapping[str, Any]:
        """What decides which sample a number of ``dataset``, the training data, stands for: plain values by name.

        Kept in checkpoints: a run does not go on where a value differs; null is not compared. By default what the
        dataset itself says (``data.samples.Identified``), or nothing: then a change of data is not noticed, and
        resuming says so. ``train.seed`` and ``tokens_per_sample`` are compared anyway.
        """
        return dataset.identity() if isinstance(dataset, Identified) else {}

    @abstractmethod
    def evaluation_dataset(self, prefix: str) -> SizedSamples[Sample]:
        """The samples of the held-out dataset ``prefix``, each once. Raises DataError if they cannot be read."""

    def class_names(self, dataset: SizedSamples[Sample]) -> Sequence[str]:
        """What the classes that measures call by a number (``confusion/0/2``) are called, of an ``evaluation_dataset``.

        By default nothing: a task may measure no classes.
        """
        return ()

    @abstractmethod
    def collate(self, samples: Sequence[Sample], rows: Sequence[int], counted: Sequence[bool] | None = None) -> Batch:
        """The micro-batch of these samples, as arrays of the host.

        Args:
            rows: where each stands in the step's global batch: what its dropout depends on.
            counted: False for rows that only fill up the batch and count nothing; None: all count.
        """

    def context_part(self, batch: Batch, rank: int, size: int) -> Batch:
        """What ``rank`` of ``size`` keeps of ``batch``, whose rows are split over them zig-zag.

        Every token that counts must count on one rank. Raises ConfigError: by default rows cannot be split.
        """
        raise ConfigError(
            f"{type(self).__name__} does not split rows over ranks, and parallel.context is {size}; "
            "set parallel.context=1, or give the task a context_part"
        )

    @abstractmethod
    def counts(self, batch: Batch) -> Mapping[str, int]:
        """The denominator of each entry of ``sums`` in this micro-batch."""

    @abstractmethod
    def inputs(self, batch: Batch, step: int, device: torch.device) -> Inputs:
        """``batch`` as the model takes it, on ``device``, for training step ``step``."""

    def with_record(self, inputs: Inputs, record: MicroBatchRecord) -> Inputs:
        """``inputs`` of a training step whose forward hands ``record`` to the model; a task with ``routed_layers``
        needs it. By default as they are.
        """
        return inputs

    @abstractmethod
    def forward(self, model: nn.Module, inputs: Inputs, hidden: Tensor | None) -> Any:
        """The output of ``model``, which ``sums`` reads: for GPT the loss of each token, [B, S].

        In a pipeline ``hidden`` is what the stage before gave, None in the first, and but for the last stage the output
        is what the next one is given, a tensor.
        """

    @abstractmethod
    def sums(self, output: Any, inputs: Inputs) -> Mapping[str, Tensor]:
        """The sum of each loss term over the micro-batch, and of what else is measured: scalars, float32 or wider."""

    @abstractmethod
    def sample_as_text(self, sample: Sample) -> list[str]:
        """``sample`` for a person, in lines: its text, with ``in_brackets`` in brackets."""

    def text_writer(self) -> TextWriter:
        """What ``train.generation`` asks for.

        By default a ConfigError: not every model writes text.
        """
        raise ConfigError(f"{type(self).__name__} writes no text; leave train.generation out")


AnyTask = Task[Any, Any, Any]
