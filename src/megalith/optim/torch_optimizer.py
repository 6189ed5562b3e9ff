"""One of torch's optimizers behind the house's protocol, with its state allocated from the start."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TorchOptimizer"]


class TorchOptimizer:
    """``optimizer``, whose state has one tensor a parameter under each of the names ``moments``.

    Args:
        optimizer: over exactly ``parameters``.
        parameters: by canonical name.
        moments: torch's names of the state tensors, of the shape and placement of their parameter.
        counts_updates: whether its state has a ``step`` too.
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
            # made now rather than at the first step, so that a checkpoint has somewhere to be read into
            state: dict[str, Tensor] = {moment: torch.zeros_like(parameter) for moment in moments}
            if counts_updates:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if state:
                optimizer.state[parameter] = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.torch_optimizer.param_groups

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self.torch_optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.torch_optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """The moments of every parameter, as ``optimizer.exp_avg.<name>``."""
        return {
            f"optimizer.{moment}.{name}": self.torch_optimizer.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in self._moments
        }

    def set_num_updates_(self, num_updates: int) -> None:
        """Sets how many updates every moment has seen, which is what AdamW corrects its bias by."""
        for state in self.torch_optimizer.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)
