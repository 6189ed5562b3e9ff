"""A run in progress: what its steps, evaluations and checkpoints work on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.loader import StepLoader
from megalith.errors import CheckpointError
from megalith.models.gpt_model import GPTModel
from megalith.observe.timers import Timers
from megalith.optim.loss_scale import DynamicLossScale
from megalith.optim.optimizer import optimizer_tensors, set_num_updates_
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.parallel.parameters import declared_parameters
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.batch import InputMaker
from megalith.training.num_microbatches_calculator import NumMicroBatchesCalculator
from megalith.training.state import TrainState

__all__ = ["Run"]


@dataclass
class Run:
    """Built by ``training.setup.build_run``; ``model`` is sharded, ``config`` resolved.

    clip_norm: largest norm of a gradient, 0 for any; nonfinite: what becomes of a step whose gradient is not finite.
    """

    config: RunConfig
    device: torch.device
    pg_collection: ProcessGroupCollection
    model: GPTModel
    optimizer: torch.optim.AdamW
    scheduler: OptimizerParamScheduler
    loss_scale: DynamicLossScale | None
    microbatches: NumMicroBatchesCalculator
    loader: StepLoader
    make_inputs: InputMaker
    clip_norm: float
    nonfinite: Literal["raise", "skip"]
    timers: Timers
    state: TrainState

    @property
    def folder(self) -> Path:
        """Where everything that this run writes goes."""
        return Path(self.config.run)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    @property
    def layout(self) -> str:
        """The layout in a few letters, such as ``tp2 sp dp4``."""
        sequence = " sp" if self.model.sequence_parallel else ""
        return f"tp{self.pg_collection.tp_size}{sequence} dp{self.pg_collection.dp_size}"

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by its canonical name, tied ones once."""
        return {name: parameter for name, parameter, _ in declared_parameters(self.model)}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint: weights and moments."""
        return self.weights() | optimizer_tensors(self.model, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """All of a checkpoint that is no tensor: counters, schedule, loss scale, and the keys of all randomness."""
        return {
            "train": self.state.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "rng": {"seed": self.config.train.seed, "step": self.state.step},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``.

        Raises:
            CheckpointError: the checkpoint was drawn from another seed.
        """
        seed = self.config.train.seed
        if state["rng"]["seed"] != seed:
            raise CheckpointError(
                f"the checkpoint's seed is {state['rng']['seed']} and train.seed is {seed}: data order and dropout "
                f"would change in the middle of the run; set train.seed={state['rng']['seed']}, "
                "or start from its weights alone with load=..."
            )
        self.state.load_state_dict(state["train"])
        self.scheduler.load_state_dict(state["scheduler"])
        set_num_updates_(self.optimizer, self.state.step - self.state.skipped_steps)
        # a run may go on in another dtype; float16 then starts with a fresh scale
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
