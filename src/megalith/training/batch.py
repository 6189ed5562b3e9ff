"""Batches on their way from the loader's arrays to the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``; to a GPU through pinned memory, so that the copy runs while the host goes on."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
