"""Adapts torch's optimizers to the Optimizer protocol, with state allocated at construction."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TorchOptimizer"]


class TorchOptimizer:
    """Wraps ``optimizer``, whose state has one tensor per parameter under each of the names ``moments``.

    Args:
        optimizer: over exactly ``parameters``.
        parameters: by canonical name.
        moments: torch's names of the state tensors, which have the shape and placement of their parameter.
        counts_updates: whether the state also has a ``step``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        moments: Sequence[str],
        *,
        counts_updates: bool,
    ) -> None:
        self.torch_optimizer = optimizer
        self._parameters = dict(parameters)
        self._moments = tuple(moments)
        for parameter in self._parameters.values():
            # allocated now rather than at the first step, so that a checkpoint can be loaded into it
            state: dict[str, Tensor] = {moment: torch.zeros_like(parameter) for moment in moments}
            if counts_updates:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if state:
                optimizer.state[parameter] = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.torch_optimizer.param_groups

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        self.torch_optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.torch_optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the moments of every parameter, as ``optimizer.exp_avg.<name>``."""
        return {
            f"optimizer.{moment}.{name}": self.torch_optimizer.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in self._moments
        }

    def set_num_updates_(self, num_updates: int) -> None:
        """Sets the number of updates that the moments have seen, which AdamW's bias correction uses."""
        for state in self.torch_optimizer.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)
