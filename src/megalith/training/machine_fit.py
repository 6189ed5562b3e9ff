"""Whether this machine has what a run needs before it can take a step: a GPU for each rank, memory for the state."""

import torch

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.observe.machine import memory_bytes
from megalith.observe.units import quantity
from megalith.training.build_model import param_dtype
from megalith.training.process_group import choose_device
from megalith.training.tasks.choose import task_of

__all__ = ["check_machine", "state_bytes"]

_MOMENTS = {"adamw": 2, "sgd": 1}  # of each parameter


def state_bytes(config: RunConfig, num_parameters: int) -> int:
    """Bytes of weights, gradients and moments of the whole model; activations come on top."""
    return (2 + _MOMENTS[config.optim.name]) * param_dtype(config).itemsize * num_parameters


def check_machine(config: RunConfig, world_size: int, num_local_ranks: int) -> None:
    """Refuses a run that surely cannot be: more ranks here than GPUs, or a state larger than the memory.

    A run that passes may still be too large: activations, and what libraries take, are not counted.

    Raises:
        ConfigError: with what is needed and what there is.
    """
    num_parameters = task_of(config).num_parameters
    layout = config.parallel.layout(world_size)
    each = state_bytes(config, num_parameters) * layout.replicate // world_size
    device = choose_device()
    if device.type == "cuda":
        if num_local_ranks > (num_gpus := torch.cuda.device_count()):
            raise ConfigError(f"--nproc ({num_local_ranks}) must be at most the number of GPUs here, {num_gpus}")
        needed, has = each, torch.cuda.get_device_properties(device).total_memory
        where, what = "on each rank", "its GPU has"
    else:
        needed, has = each * num_local_ranks, memory_bytes() or each * num_local_ranks
        where = f"on the {num_local_ranks} ranks of this machine" if num_local_ranks > 1 else "on this machine"
        what = "it has"
    if needed > has:
        raise ConfigError(
            f"the model does not fit: weights, gradients and {config.optim.name}'s state of its "
            f"{quantity(num_parameters)} parameters take {quantity(needed)}B {where}, before any activation, and "
            f"{what} {quantity(has)}B; use a smaller model, or more memory: shard it over more ranks of more machines "
            f"(parallel.shard is {layout.shard}, parallel.tensor {layout.tensor})"
        )
