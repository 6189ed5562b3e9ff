"""The parallel state that users' scripts mean when they name none: one named context, and two ways to set it.

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

import torch.distributed as dist

from megalith.config.draft import divisors
from megalith.config.layout import Degrees, Layout
from megalith.errors import TopologyError
from megalith.topology.group_options import GroupOptions
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
    """What accessors speak of, for the whole process: threads that autograd starts see it as well."""

    state: ParallelState | None = None
    vp_stage: int | None = None


_current = _Current()


@contextmanager
def use(state: ParallelState, vp_stage: int | None = None) -> Iterator[ParallelState]:
    """``state`` is current inside; ``vp_stage``: and this part of the model, of those that a stage holds."""
    outer = _current.state, _current.vp_stage
    if vp_stage is not None:
        state.script.checked_vp_stage(vp_stage)
    _current.state, _current.vp_stage = state, vp_stage
    try:
        yield state
    finally:
        _current.state, _current.vp_stage = outer


def current_parallel_state() -> ParallelState:
    """The state of the innermost ``use``, else of ``initialize_model_parallel``. Raises TopologyError without any."""
    if _current.state is None:
        raise TopologyError(
            "no parallel state is current; wanted: initialize_model_parallel(tensor_model_parallel_size=...), or "
            "with use(ParallelState(RankGrid(world_size, tensor=...))): ..."
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
    """Makes a parallel state current until ``destroy_model_parallel``; to be called on every rank of it.

    Needs torch.distributed, and makes no group yet. The state returned has a ``collection()`` to build layers with.

    Args:
        ..._parallel_size: of the axes; data parallelism takes what is left. expert_tensor's None is that of tensor.
        virtual_pipeline_model_parallel_size: parts of the model that each stage holds.
        hierarchical_context_parallel_sizes: cut the context-parallel groups into levels, the first of neighbours.
        num_distributed_optimizer_instances: weights and optimizer state are sharded within each.
        order: which axis varies fastest, from left to right.
        distributed_timeout_minutes: of collectives over all groups.
        get_embedding_ranks: ranks of a pipeline -> those that share the embedding table; None: the first and last.
        get_position_embedding_ranks: those that share the table of positions; None: the first.
        group_options: backend, timeout and NCCL's options of single groups, as for ``ParallelState``.
        rank_offset, local_world_size: the ranks to lay out, for jobs that share a world; None: all from the first on.

    Raises:
        TopologyError: a state is current already, torch.distributed is not initialised, or sizes do not fit.
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
        device_type="cuda" if "nccl" in dist.get_backend() else "cpu",
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
    """Destroys the groups of the current state, which is none afterwards; without one there is nothing to do."""
    if _current.state is not None:
        _current.state.destroy()
    _current.state = _current.vp_stage = None


def model_parallel_is_initialized() -> bool:
    """Whether a state is current."""
    return _current.state is not None


def current_vp_stage() -> int | None:
    """The part of the model that ``use`` was told; None outside of one, or where it was told none."""
    return _current.vp_stage


def _check_ready() -> None:
    if _current.state is not None:
        raise TopologyError("model parallelism is initialised already; call destroy_model_parallel() first")
    if not dist.is_initialized():
        raise TopologyError("torch.distributed is not initialised; call torch.distributed.init_process_group first")


def _grid(world: int, degrees: Degrees, num_instances: int, order: str) -> RankGrid:
    """The grid whose replicas are the instances of the distributed optimizer."""
    layout = Layout.resolve(world, **degrees)
    dp, edp = layout.data_parallel, layout.edp_replicate * layout.edp_shard
    fitting = [number for number in divisors(dp) if edp % number == 0]
    if type(num_instances) is not int or num_instances not in fitting:
        raise TopologyError(
            f"num_distributed_optimizer_instances ({num_instances!r}) must divide the data-parallel ranks of dense "
            f"weights ({dp}) and of experts ({edp}); use {', '.join(map(str, fitting))}"
        )
    replicated: Degrees = {**degrees, "replicate": num_instances}
    grid = RankGrid(world, **replicated, order=order)
    first, whole = grid.group_of("dp_shard-cp", 0), grid.group_of("dp-cp", 0)
    if grid.group_of("dp_replicate", 0) != grid.group_of("edp_replicate", 0) or first != whole[: len(first)]:
        raise TopologyError(
            f"with order {order!r} the {num_instances} instances of the distributed optimizer would not hold the same "
            "ranks for dense and expert weights; put dp after cp and ep in the order"
        )
    return grid
