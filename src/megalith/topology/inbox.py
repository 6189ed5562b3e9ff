"""Memory that a message of another rank is received into, which cannot be read by luck before it was waited for.

A receive ends at any time between its start and its wait, so that code that forgets to wait mostly reads the right
numbers. In a run that poisons buffers (``poison_buffers``) a message arrives in memory of its own, and is copied when
it has been waited for: until then its reader finds NaN, every time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Inbox", "poison_buffers", "poisons_buffers"]


def poison_buffers(on: bool) -> None:
    """Makes torch fill fresh memory with NaN, integers with the largest, while it is in deterministic mode.

    Process-wide, on every device: each torch.empty, whether ours, of a fused operation or of FSDP2. Out of reach are
    memory that is used again (FSDP2's gathered weights, whose collective arrives in fresh memory, though), what an
    all-reduce finds in place, results of torch's own operators, and what code from torch.compile allocates for itself.
    """
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


def poisons_buffers() -> bool:
    """Whether fresh memory is filled now."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Inbox:
    """One message under way.

    Attributes:
        landing: what a receive writes into.
        message: what its reader gets; the same memory, unless buffers are poisoned.
    """

    landing: Tensor
    message: Tensor

    @classmethod
    def like(cls, x: Tensor) -> "Inbox":
        """For a message of the shape, dtype and device of ``x``."""
        return cls.of(torch.empty_like(x))

    @classmethod
    def of(cls, memory: Tensor) -> "Inbox":
        """For a message that arrives in ``memory``, fresh."""
        return cls(memory, torch.empty_like(memory) if poisons_buffers() else memory)

    def opened(self) -> Tensor:
        """The message, once its receive was waited for."""
        if self.message is not self.landing:
            self.message.copy_(self.landing)
        return self.message
