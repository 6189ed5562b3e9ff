"""Peak memory of this process."""

import resource
import sys

import torch

__all__ = ["peak_memory"]


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated tensors on a GPU, as its allocator counts them, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held  # bytes on macOS, KiB elsewhere
