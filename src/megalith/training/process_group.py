"""Starts torch.distributed for a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megalith.resilience.launch import RENDEZVOUS

__all__ = ["choose_device", "process_group", "world_size_from_environment"]


def world_size_from_environment() -> int:
    """The number of ranks that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The default process group: of torchrun's ranks, of ``launch``'s, or of this process alone.

    One that exists already is left as it is.
    """
    if dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), world_size_from_environment()
        dist.init_process_group(backend, os.environ.get(RENDEZVOUS), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # torch exports it unsaid
    try:
        yield
    finally:
        dist.destroy_process_group()
