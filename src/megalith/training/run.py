"""A run in progress: what its steps, evaluations and checkpoints work on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.loader import StepLoader
from megalith.errors import CheckpointError
from megalith.observe.timers import Timers
from megalith.optim.loss_scale import DynamicLossScale
from megalith.optim.optimizer import Optimizer
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.parallel.parameters import state_tensors
from megalith.storage import Store
from megalith.topology.agreement import Attempt
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.num_microbatches_calculator import NumMicroBatchesCalculator
from megalith.training.state import STATE_VERSION, TrainState, upgraded
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule

__all__ = ["Run"]


@dataclass
class Run:
    """Built by ``training.setup.build_run``; ``config`` is resolved.

    Attributes:
        chunks: this rank's parts of the model, sharded: one, the whole of it, without a pipeline.
        checkpoints: the folder of its checkpoints.
        pending: an error of this rank alone, outside of any collective, that the next step's totals tell all ranks.
    """

    config: RunConfig
    task: AnyTask
    device: torch.device
    pg_collection: ProcessGroupCollection
    chunks: list[ModelModule]
    optimizer: Optimizer
    scheduler: OptimizerParamScheduler
    loss_scale: DynamicLossScale | None
    microbatches: NumMicroBatchesCalculator
    loader: StepLoader[Any, Any]
    timers: Timers
    state: TrainState
    checkpoints: Store
    pending: Attempt = field(default_factory=Attempt)

    @property
    def folder(self) -> Path:
        """Where everything that this run writes goes, its checkpoints by default among it."""
        return Path(self.config.run)

    @property
    def layout(self) -> str:
        """The layout in a few letters, such as ``tp2 sp dp4``."""
        tp, dp = self.pg_collection.size("tp"), self.pg_collection.size("dp")
        return f"tp{tp}{' sp' if self.config.parallel.sequence and tp > 1 else ''} dp{dp}"

    @property
    def consumed_tokens(self) -> int:
        """Tokens trained on so far, with a loss or without."""
        return self.state.consumed_samples * self.task.tokens_per_sample

    def parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter of this rank's chunks."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by its canonical name, tied ones once, and the buffers that training changes."""
        return state_tensors(*self.chunks)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint: weights and the optimizer's state."""
        return self.weights() | self.optimizer.tensors()

    def state_dict(self) -> dict[str, Any]:
        """All of a checkpoint that is no tensor: counters, schedule, loss scale, and the keys of all randomness."""
        return {
            "version": STATE_VERSION,
            "train": self.state.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "rng": {"seed": self.config.train.seed, "step": self.state.step},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``, also of an earlier version.

        Raises:
            CheckpointError: the checkpoint was drawn from another seed, or a later version wrote it.
        """
        state = upgraded(state)
        seed = self.config.train.seed
        if state["rng"]["seed"] != seed:
            raise CheckpointError(
                f"the checkpoint's seed is {state['rng']['seed']} and train.seed is {seed}: data order and dropout "
                f"would change in the middle of the run; set train.seed={state['rng']['seed']}, "
                "or start from its weights alone with load=..."
            )
        self.state.load_state_dict(state["train"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.optimizer.set_num_updates_(self.state.step - self.state.skipped_steps)
        # a run may go on in another dtype; float16 then starts with a fresh scale
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
