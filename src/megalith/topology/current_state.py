"""The parallel state used by Megatron-style accessors: one named context, and two ways to set it.

initialize_model_parallel(tensor_model_parallel_size=2)
...
destroy_model_parallel()

with use(ParallelState(RankGrid(8, tensor=2))):
    ...
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.config.draft import divisors
from megalith.config.layout import Degrees, Layout
from megalith.errors import TopologyError
from megalith.topology.group_options import GroupOptions, default_backend
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.topology.script_options import RanksOfPipeline, ScriptOptions, first_and_last_rank, first_rank

__all__ = [
    "current_parallel_state",
    "current_vp_stage",
    "destroy_model_parallel",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "use",
]


@dataclass
class _Current:
    """What the accessors read. Process-wide, so that autograd's threads see it as well."""

    state: ParallelState | None = None
    vp_stage: int | None = None


_current = _Current()


@contextmanager
def use(state: ParallelState, vp_stage: int | None = None) -> Iterator[ParallelState]:
    """Makes ``state`` current inside the block, and ``vp_stage``, the model chunk of this stage, if given."""
    outer = _current.state, _current.vp_stage
    if vp_stage is not None:
        state.script.checked_vp_stage(vp_stage)
    _current.state, _current.vp_stage = state, vp_stage
    try:
        yield state
    finally:
        _current.state, _current.vp_stage = outer


def current_parallel_state() -> ParallelState:
    """Returns the state of the innermost ``use`` or of ``initialize_model_parallel``. Raises TopologyError if none."""
    if _current.state is None:
        raise TopologyError(
            "there is no current parallel state; call initialize_model_parallel(tensor_model_parallel_size=...), or "
            "use: with use(ParallelState(RankGrid(world_size, tensor=...))): ..."
        )
    return _current.state


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    distributed_timeout_minutes: float = 30,
    get_embedding_ranks: RanksOfPipeline | None = None,
    get_position_embedding_ranks: RanksOfPipeline | None = None,
    group_options: Mapping[str, GroupOptions] | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> ParallelState:
    """Makes a parallel state current until ``destroy_model_parallel``. Call it on every rank of the layout.

    Requires torch.distributed. Creates no group yet; ``collection()`` of the result returns the groups for layers.

    Args:
        ..._parallel_size: size of each axis; data parallelism takes the rest. expert_tensor: None means that of tensor.
        virtual_pipeline_model_parallel_size: model chunks per stage.
        hierarchical_context_parallel_sizes: levels of the context-parallel groups; the first consists of neighbours.
        num_distributed_optimizer_instances: weights and optimizer state are sharded within each instance.
        order: the axes, fastest-varying first.
        distributed_timeout_minutes: timeout of collectives over all groups.
        get_embedding_ranks: ranks of a pipeline -> those that share the embedding table; None: the first and last.
        get_position_embedding_ranks: the same for the position embeddings; None: the first.
        group_options: backend, timeout and NCCL options of individual groups, as for ``ParallelState``.
        rank_offset, local_world_size: the ranks to use if several jobs share a world; default: all from rank 0 on.

    Raises:
        TopologyError: a state is already current, torch.distributed is not initialized, or sizes do not fit.
    """
    _check_ready()
    degrees = Degrees(
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
        expert=expert_model_parallel_size,
        expert_tensor=expert_tensor_parallel_size,
    )
    world = dist.get_world_size() - rank_offset if local_world_size is None else local_world_size
    _current.state = ParallelState(
        _grid(world, degrees, num_distributed_optimizer_instances, order),
        device_type="cuda" if torch.cuda.is_available() and "nccl" in default_backend() else "cpu",
        rank_offset=rank_offset,
        timeout=timedelta(minutes=distributed_timeout_minutes),
        group_options=group_options,
        script=ScriptOptions(
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
            get_embedding_ranks=get_embedding_ranks or first_and_last_rank,
            get_position_embedding_ranks=get_position_embedding_ranks or first_rank,
        ),
    )
    return _current.state


def destroy_model_parallel() -> None:
    """Destroys the groups of the current state and clears it; does nothing if there is none."""
    if _current.state is not None:
        _current.state.destroy()
    _current.state = _current.vp_stage = None


def model_parallel_is_initialized() -> bool:
    """Returns whether a state is current."""
    return _current.state is not None


def current_vp_stage() -> int | None:
    """Returns the model chunk set by ``use``; None outside of it, or if none was set."""
    return _current.vp_stage


def _check_ready() -> None:
    if _current.state is not None:
        raise TopologyError("model parallelism is already initialized; call destroy_model_parallel() first")
    if not dist.is_initialized():
        raise TopologyError("torch.distributed is not initialized; call torch.distributed.init_process_group first")


def _grid(world: int, degrees: Degrees, num_instances: int, order: str) -> RankGrid:
    """Returns the grid whose replicas are the instances of the distributed optimizer."""
    layout = Layout.resolve(world, **degrees)
    dp, edp = layout.data_parallel, layout.edp_replicate * layout.edp_shard
    fitting = [number for number in divisors(dp) if edp % number == 0]
    if type(num_instances) is not int or num_instances not in fitting:
        raise TopologyError(
            f"num_distributed_optimizer_instances ({num_instances!r}) must divide the data-parallel sizes of dense "
            f"weights ({dp}) and of expert weights ({edp}); use {', '.join(map(str, fitting))}"
        )
    replicated: Degrees = {**degrees, "replicate": num_instances}
    grid = RankGrid(world, **replicated, order=order)
    first, whole = grid.group_of("dp_shard-cp", 0), grid.group_of("dp-cp", 0)
    if grid.group_of("dp_replicate", 0) != grid.group_of("edp_replicate", 0) or first != whole[: len(first)]:
        raise TopologyError(
            f"with order {order!r} the {num_instances} instances of the distributed optimizer would not have the same "
            "ranks for dense and expert weights; put dp after cp and ep in the order"
        )
    return grid
