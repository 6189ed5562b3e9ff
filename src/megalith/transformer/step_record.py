"""What routers read and write in a training step: one record for all micro-batches of a rank.

A layer may run several times for a micro-batch, because of recomputation. Everything is therefore stored by (layer,
micro-batch), so that a second run reads, or overwrites with the same value, what the first has written.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BALANCE_LOSSES", "MicroBatchRecord", "StepRecord"]

# named as their weights in model.moe.router
BALANCE_LOSSES = ("sequence_balance", "micro_batch_balance", "global_balance", "z_loss")


class StepRecord:
    """The record of a step on this rank.

    Args:
        balance_scale: the factor on gradients of a micro-batch's balance losses, in addition to their weights: loss
            scale / (micro-batches x data-parallel ranks), so that the sum over all of them is a mean.
    """

    def __init__(self, balance_scale: float) -> None:
        self.balance_scale = balance_scale
        self._loads: dict[int, dict[int, Tensor]] = defaultdict(dict)  # layer -> micro-batch -> [E]
        self._losses: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)  # (name, layer) -> micro-batch -> []
        self._kept: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)  # (name, layer) -> micro-batch -> any

    def micro_batch(self, index: int) -> "MicroBatchRecord":
        """Returns the part of the record for micro-batch ``index``."""
        return MicroBatchRecord(self, index)

    def tokens_per_expert(self, layer: int) -> Tensor | None:
        """Returns int64 [E], how often this rank's tokens chose each expert in all micro-batches; None before any."""
        found = [*self._loads[layer].values()]
        return sum(found[1:], start=found[0]) if found else None

    def total(self, name: str, layer: int) -> Tensor | None:
        """Returns the sum of what ``layer`` has kept as ``name`` in the micro-batches so far; None before any."""
        found = [*self._kept[name, layer].values()]
        return sum(found[1:], start=found[0]) if found else None

    def loss(self, name: str, layer: int) -> Tensor | None:
        """Returns this rank's part of the balance loss ``name``, summed over all micro-batches, a float64 scalar.

        None before any. It stays on its device, since there may be hundreds in a step.
        """
        found = [*self._losses[name, layer].values()]
        return torch.stack(found).sum(dtype=torch.float64) if found else None


@dataclass(frozen=True)
class MicroBatchRecord:
    """The part of a step's record for one micro-batch, to which a layer's forward writes."""

    step: StepRecord
    index: int

    @property
    def balance_scale(self) -> float:
        """See ``StepRecord``."""
        return self.step.balance_scale

    def add(self, layer: int, tokens_per_expert: Tensor) -> None:
        """Stores the load of ``layer``, int64 [E]: how often this rank's tokens chose each expert."""
        self.step._loads[layer][self.index] = tokens_per_expert

    def add_loss(self, name: str, layer: int, value: Tensor) -> None:
        """Stores this rank's part of a balance loss of ``layer``, a scalar without its weight."""
        self.step._losses[name, layer][self.index] = value.detach()

    def kept(self, name: str, layer: int, compute: Callable[[], Tensor]) -> Tensor:
        """Returns what ``compute`` returned the first time, without a gradient.

        For collectives, which a second run need not repeat, and for values that would be different by then.
        """
        values = self.step._kept[name, layer]
        if self.index not in values:
            values[self.index] = compute().detach()
        return values[self.index]
