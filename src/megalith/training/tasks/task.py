"""The interface of a task: what a run trains. The rest of ``training/`` depends on no model, only on this."""

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
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.module import ModelModule
from megalith.transformer.stage import Stage
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["AnyTask", "JointTask", "StageTraffic", "Task", "TextSample", "TextWriter"]

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class StageTraffic:
    """What a stage of a model makes its ranks exchange; a model that is not split is one stage.

    Attributes:
        micro_batch: forward and backward of a micro-batch, over tensor and context, and over ranks that share experts.
        per_label: what each predicted token adds, if only some tokens are predicted: a number of collectives, with the
            bytes of one token.
        units: the weights of each of the model's ``fsdp_units``, and ``rest``: those in none.
        expert_units: the indices of the units that are experts.
        shared: the weights of which other stages have copies, by a name that all these stages use.
        hidden_bytes: size of the hidden states that stages send each other.
        forward: the part of ``micro_batch`` that a forward without a backward exchanges, as the first pass of a
            ``JointTask`` does.
        per_step: what is exchanged once per step, whatever its micro-batches.
    """

    micro_batch: Traffic
    units: Sequence[Sequence[Weight]]
    rest: Sequence[Weight]
    expert_units: frozenset[int] = frozenset()
    shared: Mapping[str, Weight] = field(default_factory=dict)
    per_label: Traffic = field(default_factory=Traffic)
    hidden_bytes: int = 0
    forward: Traffic = field(default_factory=Traffic)
    per_step: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class TextSample:
    """A prompt and the model's completion."""

    prompt: str
    text: str


class TextWriter(Protocol):
    """Generates a text for each prompt of a run. Collective; all ranks get the same texts."""

    def __call__(self, pipeline: Pipeline[Any]) -> list[TextSample]: ...


class Task(ABC, Generic[Sample, Batch, Inputs]):
    """The data, the model and the loss of a run.

    The loss of a step is the sum over ``terms`` of weight * (sum of the term) / (count of the term), with sums and
    counts over the global batch. Counts are known before the first forward, so that gradients do not depend on how the
    batch is split. Entries of ``sums`` and ``counts`` that are not in ``terms``, such as an accuracy, are only measured
    in evaluation.

    Attributes:
        terms: the weight of each loss term, by name; the first is the run's main loss.
        tokens_per_sample: how many tokens of a sample the model reads, with or without a loss.
        flops_per_sample: model FLOPs of training on a sample, forward and backward, without recomputation.
        num_parameters: of the whole model.
        num_expert_parameters: of these, the parameters of the routed experts.
        routed_layers: the layers with experts, in all stages, by their index.
        usual_labels: how many tokens of a micro-batch a rank predicts on average, if that depends on the text.
        class_heads: the heads of the model that score the classes named in ``data_identity``. A run that starts from a
            model of other classes initializes them anew.
        in_brackets: what ``sample_as_text`` puts in brackets.
        counted: what the first term is a mean over, in the plural.
    """

    counted: str = "tokens"
    in_brackets: str = "tokens without a loss"
    class_heads: frozenset[str] = frozenset()
    terms: Mapping[str, float]
    tokens_per_sample: int
    flops_per_sample: int
    num_parameters: int
    num_expert_parameters: int = 0
    routed_layers: Mapping[int, MoEConfig] = MappingProxyType({})
    usual_labels: int | None = None

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The number of tokens in each row that the model reads of a sample; by default there is one row."""
        return (self.tokens_per_sample,)

    @abstractmethod
    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> ModelModule:
        """Builds the model on torch's current default device, or a ``stage`` of it if ``costs`` allows splitting it."""

    def costs(self) -> ModelCosts:
        """Returns the cost of each part of the model, by which layers are assigned to pipeline stages.

        Raises ConfigError by default, because not every model can be split into stages.
        """
        raise ConfigError(f"the model of {type(self).__name__} cannot be split into stages; use parallel.pipeline=1")

    def traffic(self, layout: Layout, stage: Stage | None = None) -> StageTraffic:
        """Counts what ``stage``, by default the whole model, makes its ranks exchange in training under ``layout``.

        Raises ConfigError by default, because not every task counts it.
        """
        raise ConfigError(f"{type(self).__name__} does not count the traffic of its model; define its traffic()")

    def hidden_shape(self, batch: Batch, options: BuildOptions) -> tuple[int, ...]:
        """Returns this rank's shape of what a stage sends to the next for ``batch``; a task with ``costs`` needs it."""
        raise NotImplementedError

    def hidden_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of what a stage sends to the next; by default ``compute_dtype``."""
        return compute_dtype

    @abstractmethod
    def train_dataset(self) -> Samples[Sample]:
        """Returns the samples to train on. Raises DataError if they cannot be read."""

    def data_identity(self, dataset: Samples[Sample]) -> Mapping[str, Any]:
        """Returns plain values, by name, that determine which sample each index of the training ``dataset`` refers to.

        Checkpoints store them, and a run does not continue if one differs; None is not compared. By default they come
        from the dataset (``data.samples.Identified``), or there are none: then changed data go unnoticed, and resuming
        says so. ``train.seed`` and ``tokens_per_sample`` are always compared.
        """
        return dataset.identity() if isinstance(dataset, Identified) else {}

    @abstractmethod
    def evaluation_dataset(self, prefix: str) -> SizedSamples[Sample]:
        """Returns the samples of the held-out dataset ``prefix``, each once. Raises DataError if it cannot be read."""

    def class_names(self, dataset: SizedSamples[Sample]) -> Sequence[str]:
        """Returns the names of the classes that measures on ``dataset`` refer to by number (``confusion/0/2``).

        Empty by default: a task may measure no classes.
        """
        return ()

    @abstractmethod
    def collate(self, samples: Sequence[Sample], rows: Sequence[int], counted: Sequence[bool] | None = None) -> Batch:
        """Returns the micro-batch of these samples, as arrays on the host.

        Args:
            rows: the index of each sample in the step's global batch, which determines its dropout.
            counted: False for padding rows, which count nothing; None: all rows count.
        """

    def context_part(self, batch: Batch, rank: int, size: int) -> Batch:
        """Returns the part of ``batch`` for ``rank`` of ``size``, over which its rows are split zig-zag.

        Every token that counts must count on one rank. Raises ConfigError by default: rows cannot be split.
        """
        raise ConfigError(
            f"{type(self).__name__} does not split rows over ranks, but parallel.context is {size}; "
            "set parallel.context=1, or define the task's context_part"
        )

    @abstractmethod
    def counts(self, batch: Batch) -> Mapping[str, int]:
        """Returns the denominator of each entry of ``sums`` in this micro-batch."""

    @abstractmethod
    def inputs(self, batch: Batch, step: int, device: torch.device) -> Inputs:
        """Returns ``batch`` as inputs of the model, on ``device``, for training step ``step``."""

    def with_record(self, inputs: Inputs, record: MicroBatchRecord) -> Inputs:
        """Returns ``inputs`` that make ``forward`` pass ``record`` to the model; by default unchanged.

        Required of a task with ``routed_layers``. Called in training only.
        """
        return inputs

    @abstractmethod
    def forward(self, model: nn.Module, inputs: Inputs, hidden: Tensor | None) -> Any:
        """Returns the output of ``model``, which ``sums`` reads: for GPT the loss of each token, [B, S].

        In a pipeline, ``hidden`` is the output of the previous stage, None in the first. All stages but the last return
        a tensor for the next stage.
        """

    @abstractmethod
    def sums(self, output: Any, inputs: Inputs) -> Mapping[str, Tensor]:
        """Returns the sum over the micro-batch of each loss term and other measure: scalars, float32 or wider."""

    @abstractmethod
    def sample_as_text(self, sample: Sample) -> list[str]:
        """Formats ``sample`` for the user, in lines: its text, with ``in_brackets`` in brackets."""

    def text_writer(self) -> TextWriter:
        """Returns the writer for the prompts of ``train.generation``.

        Raises ConfigError by default, because not every model writes text.
        """
        raise ConfigError(f"{type(self).__name__} does not generate text; leave train.generation out")


class JointTask(Task[Sample, Batch, Inputs]):
    """A task whose loss compares the samples of a whole global batch with each other, as in-batch negatives do.

    A step first computes the outputs of all micro-batches, then the loss and its gradient with respect to them, and
    propagates that in a second pass over the micro-batches ("GradCache", Gao et al. 2021, arXiv:2101.06983). A step of
    one micro-batch per rank takes one pass. So the loss depends neither on the micro-batch size nor on the layout, and
    memory is that of one micro-batch. Both passes drop the same elements, which depend on step and token alone.

    In the last stage ``forward`` returns a tensor. In evaluation, all held-out samples are compared.
    """

    def compared(self, inputs: Inputs) -> Any:
        """Returns what ``joint_sums`` reads of ``inputs``, which is kept until all micro-batches have been run.

        By default all of it.
        """
        return inputs

    @abstractmethod
    def joint_sums(
        self, outputs: Sequence[Tensor], compared: Sequence[Any], pg_collection: ProcessGroupCollection
    ) -> Mapping[str, Tensor]:
        """Returns ``sums`` over this rank's samples, which are compared with those of all ranks.

        Collective over the ranks with the same stage and part of the layers, which all have as many samples.

        Args:
            outputs: of each of this rank's micro-batches. Without gradients they are of an evaluation.
            compared: ``compared`` of the inputs of each of them.
        """

    def sums(self, output: Tensor, inputs: Inputs) -> Mapping[str, Tensor]:
        """``joint_sums`` over a single micro-batch."""
        return self.joint_sums([output], [self.compared(inputs)], ProcessGroupCollection.single())


AnyTask = Task[Any, Any, Any]
