"""Copies to a device; from the CPU to a GPU so that the host does not wait for the work queued there."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: NDArray[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Copies ``values`` to ``device``; to a GPU through pinned memory, without which the host waits for the copy."""
    tensor, device = values if isinstance(values, Tensor) else torch.from_numpy(values), torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
