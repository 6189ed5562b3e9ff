"""The most memory that this process has held at once."""

import resource
import sys

import torch

__all__ = ["peak_memory"]


def peak_memory(device: torch.device) -> int:
    """Bytes, the most so far: of tensors on a GPU, as its allocator counts them, else of all that the process holds."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held  # bytes on macOS, KiB elsewhere
