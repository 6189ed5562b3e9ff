"""Receive buffers for messages from other ranks, with a mode that exposes reads before the wait.

A receive may complete at any time between its start and its wait, so code that forgets to wait usually reads correct
values. With poisoned buffers (``poison_buffers``), a message arrives in separate memory and is copied out after the
wait: until then its reader always finds NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Inbox", "poison_buffers", "poisons_buffers"]


def poison_buffers(on: bool) -> None:
    """Makes torch fill new memory with NaN (integers: the maximum) while deterministic mode is on.

    Process-wide, on every device: every torch.empty, whether called here, by a fused operation or by FSDP2. Not
    covered: memory that is reused (FSDP2's gathered weights, although their collective arrives in new memory), the
    input of an in-place all-reduce, results of torch's own operators, and memory that compiled code allocates for
    itself.
    """
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


def poisons_buffers() -> bool:
    """Returns whether new memory is being filled."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Inbox:
    """Receive buffer of one message.

    Attributes:
        landing: the buffer that the receive writes into.
        message: what the reader gets; the same memory, unless buffers are poisoned.
    """

    landing: Tensor
    message: Tensor

    @classmethod
    def like(cls, x: Tensor) -> "Inbox":
        """Returns an inbox for a message of the shape, dtype and device of ``x``."""
        return cls.of(torch.empty_like(x))

    @classmethod
    def of(cls, memory: Tensor) -> "Inbox":
        """Returns an inbox for a message that arrives in ``memory``, which must be newly allocated."""
        return cls(memory, torch.empty_like(memory) if poisons_buffers() else memory)

    def opened(self) -> Tensor:
        """Returns the message; call it after the receive has been waited for."""
        if self.message is not self.landing:
            self.message.copy_(self.landing)
        return self.message
