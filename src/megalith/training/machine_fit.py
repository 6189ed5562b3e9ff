"""Checks that this machine can run the first step: a GPU for each rank, FP8, and memory for the state."""

from collections import Counter
from dataclasses import astuple, dataclass

import torch

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.observe.energy_sources import why_no_energy
from megalith.observe.machine import memory_bytes
from megalith.observe.units import quantity
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import declared_parameters
from megalith.topology.process_groups_config import Family, ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.training.build_model import check_products, param_dtype, placement_of_run, stages_of
from megalith.training.exchange_sizes import symmetric_sizes
from megalith.training.process_group import choose_device
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule
from megalith.wording import counted

__all__ = ["StateBytes", "check_machine", "copy_bytes", "rank_state_bytes", "state_bytes"]

_MOMENTS = {"adamw": 2, "sgd": 1}  # per parameter


@dataclass(frozen=True)
class StateBytes:
    """Bytes that persist from step to step; activations are not included."""

    weights: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.moments


def state_bytes(config: RunConfig, num_parameters: int, num_copied: int = 0) -> StateBytes:
    """Returns the state of ``num_parameters`` parameters and ``num_copied`` copies, which have no moments."""
    itemsize = param_dtype(config).itemsize
    weights = (num_parameters + num_copied) * itemsize
    return StateBytes(weights, weights, _MOMENTS[config.optim.name] * num_parameters * itemsize)


def rank_state_bytes(config: RunConfig, task: AnyTask, world_size: int) -> list[StateBytes]:
    """Returns ``state_bytes`` per rank, by its position along the pipeline; ranks of a stage hold equal parts.

    Experts are split over a different rank grid than other weights, and may be replicated more or less often.
    """
    layout = config.parallel.layout(world_size)
    ranks = world_size // layout.pipeline
    found = []
    for held in _pipeline_parameters(config, task):
        dense, expert = state_bytes(config, held.dense, held.copied), state_bytes(config, held.expert)
        parts = zip(astuple(dense), astuple(expert), strict=True)
        found.append(
            StateBytes(*(d // (ranks // layout.replicate) + e // (ranks // layout.edp_replicate) for d, e in parts))
        )
    return found


def copy_bytes(config: RunConfig, held: StateBytes, world_size: int) -> int:
    """Returns the CPU memory in which a rank that holds ``held`` keeps its copy for ``checkpoint.async_save``.

    Replicas share the writing of weights and moments. For experts, which may be replicated less often than other
    weights, this is too low.
    """
    if not config.checkpoint.async_save:
        return 0
    layout = config.parallel.layout(world_size)
    return (held.weights + held.moments) // max(layout.replicate, layout.edp_replicate)


def check_machine(config: RunConfig, world_size: int, local_ranks: range) -> None:
    """Rejects a run that cannot start: no FP8 or energy counter, more ranks than GPUs, a state larger than the memory.

    ``local_ranks`` are those of this machine. A run that passes may still be too large, because activations and the
    libraries' own memory are not counted.

    Raises:
        ConfigError: says what is needed and what there is.
    """
    task, layout = task_of(config), config.parallel.layout(world_size)
    along_pipeline, grid = rank_state_bytes(config, task, world_size), RankGrid(layout)
    sizes = symmetric_sizes(config)
    buffers = 0 if sizes is None else sizes.num_bytes  # on every rank, even for stages without experts
    states = [along_pipeline[grid.position("pp", rank)] for rank in local_ranks]
    held = [state.total + buffers for state in states]
    copied = sum(copy_bytes(config, state, world_size) for state in states)
    device, num_local_ranks = choose_device(), len(local_ranks)
    check_products(config, device)
    if config.train.log_energy and (reason := why_no_energy(device)) is not None:
        raise ConfigError(
            f"train.log_energy cannot measure here: {reason}; set train.log_energy=false to train without it"
        )
    if device.type == "cuda":
        if num_local_ranks > (num_gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"this machine has {counted(num_local_ranks, 'rank')} and {counted(num_gpus, 'GPU')}, but each rank "
                f"needs a GPU of its own; start at most {num_gpus} here (--nproc, or torchrun --nproc-per-node)"
            )
        needed, has = max(held), torch.cuda.get_device_properties(device).total_memory
        where, what, more = "on one rank", "its GPU has", "more ranks"
    else:
        needed, has = sum(held), memory_bytes() or sum(held)
        where = f"on the {num_local_ranks} ranks of this machine" if num_local_ranks > 1 else "on this machine"
        what, more = "it has", "ranks on more machines"
    if needed > has:
        exchange = f", with {quantity(buffers)}B each for parallel.dispatch.method=symmetric" if buffers else ""
        raise ConfigError(
            f"the model does not fit: weights, gradients and {config.optim.name} state for its "
            f"{quantity(task.num_parameters)} parameters take {quantity(needed)}B {where}{exchange}, without "
            f"activations, and {what} {quantity(has)}B; use a smaller model, or more memory: shard it over {more} "
            f"(parallel.shard is {layout.shard}, parallel.tensor is {layout.tensor})"
        )
    if copied:
        _check_copies(copied if device.type == "cuda" else needed + copied, num_local_ranks)


def _check_copies(needed: int, num_local_ranks: int) -> None:
    """Raises ConfigError if the CPU memory of this machine is below ``needed`` bytes, which include the copies."""
    if needed > (has := memory_bytes() or needed):
        ranks = f"the {num_local_ranks} ranks of this machine need" if num_local_ranks > 1 else "this machine needs"
        raise ConfigError(
            "the copy of weights and optimizer state that checkpoint.async_save keeps in CPU memory does not fit: with "
            f"it, {ranks} {quantity(needed)}B, and there are {quantity(has)}B; set checkpoint.async_save=false"
        )


@dataclass(frozen=True)
class _Held:
    """Parameter counts: of experts, of all other weights, and of copies of the latter."""

    expert: int
    dense: int
    copied: int = 0


def _pipeline_parameters(config: RunConfig, task: AnyTask) -> list[_Held]:
    """Returns the parameter counts of the stages of each rank along the pipeline."""
    placement = placement_of_run(config)
    if placement.num_stages == 1:
        num_expert = task.num_expert_parameters
        return [_Held(num_expert, task.num_parameters - num_expert)]
    options = BuildOptions(ProcessGroupCollection.single())
    chunks: list[list[ModelModule]] = [[] for _ in range(placement.num_ranks)]
    for number, stage in enumerate(stages_of(config, task)):
        with torch.device("meta"):
            chunks[placement.place(number)[0]].append(task.build_model(options, stage))
    return [_held(mine) for mine in chunks]


def _held(chunks: list[ModelModule]) -> _Held:
    total = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    numbers = Counter[Family]()
    for _, parameter, spec in declared_parameters(*chunks):
        numbers[spec.family] += parameter.numel()
    return _Held(numbers["expert"], numbers["dense"], total - numbers.total())
