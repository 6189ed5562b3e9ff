"""A run in progress: the state that steps, evaluations and checkpoints work on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.loader import StepLoader
from megalith.observe.timers import Timers
from megalith.optim.loss_scale import DynamicLossScale
from megalith.optim.optimizer import Optimizer
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import state_tensors
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.storage import Store
from megalith.topology.agreement import Attempt
from megalith.topology.process_groups_config import Axis, ProcessGroupCollection
from megalith.training.continuity import kept_settings
from megalith.training.num_microbatches_calculator import NumMicroBatchesCalculator
from megalith.training.state import STATE_VERSION, SavedState, TrainState
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule

__all__ = ["Run"]

_SPLITTING: tuple[Axis, ...] = ("cp", "pp")  # shown in a layout if their size is above 1
_OF_EXPERTS: tuple[Axis, ...] = ("ep", "etp")


@dataclass
class Run:
    """A run in progress, built by ``training.setup.build_run``; ``config`` is resolved.

    Attributes:
        options: the build options of the model, including this rank's process groups.
        pipeline: this rank's sharded chunks of the model; without pipeline parallelism one chunk, the whole model.
        checkpoints: the folder of its checkpoints.
        data_identity: the task's description of the training data, for ``state_dict``.
        pending: an error of this rank alone, outside of any collective; the next step's totals pass it on to all ranks.
    """

    config: RunConfig
    task: AnyTask
    device: torch.device
    options: BuildOptions
    pipeline: Pipeline[ModelModule]
    optimizer: Optimizer
    scheduler: OptimizerParamScheduler
    loss_scale: DynamicLossScale | None
    microbatches: NumMicroBatchesCalculator
    loader: StepLoader[Any, Any]
    timers: Timers
    state: TrainState
    checkpoints: Store
    data_identity: Mapping[str, Any]
    pending: Attempt = field(default_factory=Attempt)

    @property
    def pg_collection(self) -> ProcessGroupCollection:
        """This rank's process groups."""
        return self.options.pg_collection

    @property
    def chunks(self) -> Sequence[ModelModule]:
        """This rank's chunks of the model."""
        return self.pipeline.chunks

    @property
    def folder(self) -> Path:
        """The folder for everything that this run writes, by default including its checkpoints."""
        return Path(self.config.run)

    @property
    def layout(self) -> str:
        """A short form of the layout: ``tp2 sp dp4``; ``tp2 cp2 pp4 ep2 dp4`` if rows, layers and experts are split."""
        groups = self.pg_collection
        axes = _SPLITTING + (_OF_EXPERTS if self.task.routed_layers else ())
        split = [f"{axis}{groups.size(axis)}" for axis in axes if groups.size(axis) > 1]
        sequence = ["sp"] if self.options.sequence_parallel else []
        return " ".join([f"tp{groups.size('tp')}", *sequence, *split, f"dp{groups.size('dp')}"])

    @property
    def consumed_tokens(self) -> int:
        """The number of tokens trained on so far, with or without a loss."""
        return self.state.consumed_samples * self.task.tokens_per_sample

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns every parameter of this rank's chunks."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def counted_parameters(self) -> list[torch.nn.Parameter]:
        """Returns ``parameters`` without copies of weights that count in another stage."""
        copies = {id(weight) for chunk in self.chunks for weight in chunk.copied_weights()}
        return [parameter for parameter in self.parameters() if id(parameter) not in copies]

    def weights(self) -> dict[str, Tensor]:
        """Returns every parameter by its canonical name, tied ones once, and the buffers that training changes."""
        return state_tensors(*self.chunks)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of a checkpoint: weights and the optimizer's state."""
        return self.weights() | self.optimizer.tensors()

    def state_dict(self) -> dict[str, Any]:
        """Returns the non-tensor part of a checkpoint: counters, schedule, loss scale, seed, data, settings."""
        return {
            "version": STATE_VERSION,
            "train": self.state.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "rng": {"seed": self.config.train.seed, "step": self.state.step},
            "data": {
                "tokens": self.consumed_tokens,
                "tokens_per_sample": self.task.tokens_per_sample,
                "identity": dict(self.data_identity),
            },
            "settings": kept_settings(self.config),
            "layout": self.layout,
        }

    def load_state(self, saved: SavedState) -> None:
        """Restores a ``state_dict()`` that ``read_saved_state`` has checked."""
        self.state = replace(saved.train)
        self.scheduler.load_state_dict(saved.scheduler)
        self.optimizer.set_num_updates_(self.state.step - self.state.skipped_steps)
        # a run may resume in another dtype; float16 then starts with a fresh scale
        if self.loss_scale is not None and saved.loss_scale is not None:
            self.loss_scale.load_state_dict(saved.loss_scale)
