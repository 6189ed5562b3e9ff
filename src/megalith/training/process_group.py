"""Starts torch.distributed for a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.errors import ConfigError
from megalith.resilience.rank_watch import RENDEZVOUS
from megalith.torch_compat.distributed import abort_process_groups
from megalith.training.torchrun_environment import check_rendezvous, launched_rank

__all__ = ["choose_device", "process_group", "world_size_from_environment"]

# of collectives over all ranks, which wait for one that hashes or writes a large file alone, such as the single file of
# an imported checkpoint; NCCL's own default is ten minutes
_SLOWEST = timedelta(minutes=30)


def world_size_from_environment() -> int:
    """Returns the number of ranks a launcher started; 1 without one. Raises ConfigError for incomplete variables."""
    launched = launched_rank()
    return 1 if launched is None else launched.world_size


def choose_device() -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none. Raises ConfigError if it cannot be told which."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if "LOCAL_RANK" not in os.environ and num_gpus > 1 and world_size_from_environment() > 1:
        raise ConfigError(
            f"RANK is set, but LOCAL_RANK is not, so that all ranks of a machine would use the first of its {num_gpus} "
            "GPUs; start the ranks with torchrun, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    if local_rank >= num_gpus:
        raise ConfigError(
            f"LOCAL_RANK ({local_rank}) must be below the number of GPUs that this process sees ({num_gpus}); start no "
            "more ranks than that on a machine, or set CUDA_VISIBLE_DEVICES='' to train on CPUs"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initializes the default process group: of torchrun's ranks, of ``launch``'s, or of this process alone.

    An existing group is left as it is. An error inside the block tears the group down at once, whatever other ranks do.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # also for an existing group: FSDP2 and object collectives use the current one
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if (launched := launched_rank()) is not None:
        if (place := os.environ.get(RENDEZVOUS)) is None:
            check_rendezvous()
        dist.init_process_group(backend, place, timeout=_SLOWEST, rank=launched.rank, world_size=launched.world_size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # torch re-exports it implicitly
    try:
        yield
    except BaseException:
        if backend == "nccl":
            # destroying it would wait for collectives in flight, which ranks without the error may never join
            abort_process_groups()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
