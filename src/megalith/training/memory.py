"""The memory of a rank: estimated before a run without allocating it, and measured after its first step.

weights      parameters, in float32 or wider
gradients    as many bytes
moments      the optimizer's state
gathered     weights in the compute dtype, whole FSDP units at a time, and their gradients in the backward
activations  everything else at the peak: what the forward keeps for the backward, of every micro-batch in flight, and
             intermediate tensors of both

Activations are counted by running the forward and backward of a micro-batch on fake tensors, which have shapes and no
memory. What the libraries themselves take is not counted.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.fusions.core.preference import without_compiling
from megalith.observe.memory import peak_memory
from megalith.observe.units import quantity
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.parameters import refill_buffers_
from megalith.parallel.pipeline.schedules import build_schedule
from megalith.parallel.pipeline.simulate import Costs, simulate
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.torch_compat.distributed import fake_ranks
from megalith.torch_compat.live_tensors import bytes_of_tensors
from megalith.torch_compat.tensors import DEPENDS_ON_VALUES, fake_tensors
from megalith.training.batch import collate_for
from megalith.training.build_model import DTYPES, layer_product, placement_of_run, recompute_, stages_of
from megalith.training.machine_fit import StateBytes, rank_state_bytes
from megalith.training.process_group import choose_device
from megalith.training.run import Run
from megalith.training.tasks.task import AnyTask
from megalith.transformer.module import ModelModule
from megalith.transformer.stage import Stage

__all__ = ["Memory", "memory_so_far", "planned_memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, by purpose."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(astuple(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {quantity(getattr(self, field.name))}B" for field in fields(self))
        return f"{quantity(self.total)}B: {parts}"


@dataclass(frozen=True)
class _Counted:
    """Bytes of a stage and one micro-batch: kept until the backward, at the peak, and gathered weights."""

    kept: int
    peak: int
    gathered: int


def planned_memory(config: RunConfig, task: AnyTask, world_size: int) -> Memory:
    """Estimates the memory of the rank that needs the most, among those that hold the first part of each split.

    Reads the first micro-batch.

    Raises:
        ConfigError: the memory depends on tensor values: the rows of experts on the router, and those of a masked-LM
            head on the masks; or torch.distributed is already initialized.
    """
    if task.routed_layers:
        raise ConfigError("the number of rows per expert depends on the router")
    if torch.distributed.is_initialized():
        raise ConfigError("the ranks have already been started; use --nproc instead of torchrun")
    try:
        with fake_ranks(world_size), without_compiling():
            counted = _counted_stages(config, task, world_size)
    except DEPENDS_ON_VALUES as error:
        raise ConfigError(
            "the sizes of some tensors depend on the values of others, such as which tokens are masked"
        ) from error
    states = rank_state_bytes(config, task, world_size)
    placement = placement_of_run(config)
    if placement.num_stages == 1:
        [alone] = counted
        return _memory(states[0], alone.gathered, alone.peak)
    layout = config.parallel.layout(world_size)
    num_microbatches = config.train.global_batch_size // (config.train.micro_batch_size * layout.data_parallel)
    schedule = build_schedule(
        config.parallel.schedule, config.parallel.pipeline, num_microbatches, config.parallel.virtual
    )
    in_flight = simulate(schedule, [Costs(activations=each.kept) for each in counted]).peak_memory
    found = []
    for rank, state in enumerate(states):
        mine = [counted[placement.stage(rank, chunk)] for chunk in range(placement.num_chunks)]
        between = max(each.peak - each.kept for each in mine)  # only one chunk computes at a time
        found.append(_memory(state, sum(each.gathered for each in mine), int(in_flight[rank]) + between))
    return max(found, key=lambda memory: memory.total)


def memory_so_far(run: Run) -> str:
    """Formats the peak memory of this rank of ``run``, broken down as in ``planned_memory``.

    On a CPU it is the memory of the whole process, including the libraries.
    """
    peak, weights = peak_memory(run.device), _bytes(run.parameters())
    moments = _bytes(run.optimizer.tensors().values())
    rest = peak - 2 * weights - moments
    return (
        f"{quantity(peak)}B on rank 0: weights {quantity(weights)}B, gradients {quantity(weights)}B, moments "
        f"{quantity(moments)}B, and everything else, including gathered weights and activations, {quantity(rest)}B"
    )


def _memory(state: StateBytes, gathered: int, activations: int) -> Memory:
    return Memory(state.weights, state.gradients, state.moments, gathered, activations)


def _counted_stages(config: RunConfig, task: AnyTask, world_size: int) -> list[_Counted]:
    device, parallel = choose_device(), config.parallel
    layout = parallel.layout(world_size)
    state, placement = ParallelState(RankGrid(layout), device_type=device.type), placement_of_run(config)
    groups = state.collection(output_rank=placement.place(placement.num_stages - 1)[0])
    options = BuildOptions(
        groups,
        DTYPES[config.precision.dtype],
        parallel.sequence,
        context_method=ContextMethod(parallel.context_method, parallel.context_inner or 1),
        fused_linear_cross_entropy=config.train.fused_linear_cross_entropy,
        layer_product=layer_product(config),
    )
    samples, B = task.train_dataset(), config.train.micro_batch_size
    batch = collate_for(task, groups)([samples[row] for row in range(B)], range(B))
    inputs = task.inputs(batch, 0, device)
    keeps_gathered = placement.num_stages > 1 or groups.data_mesh("dense").size(-1) == 1
    found = []
    for stage in [None] if placement.num_stages == 1 else stages_of(config, task):
        with torch.device("meta"):
            shaped = task.build_model(options) if stage is None else task.build_model(options, stage)
        gathered = _gathered_bytes(shaped, everything=keeps_gathered)
        with fake_tensors(), torch.device(device):
            model = shaped.to_empty(device=device)  # building it here would draw every weight
            refill_buffers_(model)
            recompute_(model, config)
            hidden = _hidden(task, batch, options, stage, device)
            ends = stage is None or stage.has_head
            found.append(_Counted(*_run(model, task, inputs, hidden, ends=ends), gathered))
    return found


def _run(model: ModelModule, task: AnyTask, inputs: object, hidden: Tensor | None, *, ends: bool) -> tuple[int, int]:
    """Returns the bytes kept after the forward, and the peak of both passes; ``ends``: the stage computes the loss."""
    with bytes_of_tensors(model) as counted:
        output = task.forward(model, inputs, hidden)
        if ends:
            output = torch.stack(list(task.sums(output, inputs).values())).sum()
        kept = counted("current")
        output.backward(torch.ones_like(output))
        return kept, max(kept, counted("peak"))  # the peak may come late, when gradients outweigh activations


def _hidden(
    task: AnyTask, batch: object, options: BuildOptions, stage: Stage | None, device: torch.device
) -> Tensor | None:
    """Returns a tensor like the hidden states from the previous stage."""
    if stage is None or stage.has_embedding:
        return None
    shape, dtype = task.hidden_shape(batch, options), task.hidden_dtype(options.dtype)
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)


def _gathered_bytes(model: ModelModule, *, everything: bool) -> int:
    """Returns the bytes of gathered weights: of all units if ``everything``, else of two, one of them prefetched.

    Includes the gradients of two units, one of them being reduced.
    """
    inside: set[int] = set()
    units = []
    for unit in (*model.fsdp_units(), model):
        mine = [parameter for parameter in unit.parameters() if id(parameter) not in inside]
        inside.update(map(id, mine))
        units.append(_bytes(mine))
    two = sum(sorted(units)[-2:])
    return (sum(units) if everything else two) + two


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of this rank's parts of ``tensors``."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
