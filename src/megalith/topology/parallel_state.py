"""This process' place in the layout: its groups, made when first needed, and the device mesh of FSDP2 and DTensor.

Nothing here is global but one named context: ``with use(state):`` makes ``state`` current for the accessors that the
field knows (``get_tensor_model_parallel_rank`` and its kin), for users' scripts. Inside this package groups are handed
to constructors as a ``ProcessGroupCollection``. Several states can live in one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalith.errors import TopologyError
from megalith.topology.process_groups_config import Family, ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid

__all__ = [
    "ParallelState",
    "current_parallel_state",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "use",
]

# of each family's mesh, its dimensions from the slowest on, and the axes of the grid that each spans
_MESH_AXES: dict[Family, dict[str, str]] = {
    "dense": {"dp_replicate": "dp_replicate", "dp_shard": "dp_shard-cp", "tp": "tp"},
    "expert": {"edp_replicate": "edp_replicate", "edp_shard": "edp_shard", "ep": "ep", "etp": "etp"},
}


class ParallelState:
    """The groups of one rank of a grid.

    Sizes and ranks need no torch.distributed. Groups and the mesh do, and making one is a collective of its members:
    all of them must ask for the same groups in the same order.

    Args:
        grid: the layout.
        rank: this process' place in it; None: its rank in the default process group, or 0 without one.
        device_type: of the mesh, "cpu" or "cuda".

    Raises:
        TopologyError: the default group has another number of ranks than the grid, or ``rank`` is not in it.
    """

    def __init__(self, grid: RankGrid, rank: int | None = None, device_type: str = "cpu") -> None:
        self.grid = grid
        self.device_type = device_type
        self.global_rank = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
        if rank is None and (world := dist.get_world_size() if dist.is_initialized() else 1) != grid.world_size:
            raise TopologyError(
                f"the grid is of {grid.world_size} ranks, and this world has {world}; start {grid.world_size} "
                f"processes (torchrun --nproc-per-node), or change the layout"
            )
        grid.position("dp", self.global_rank)  # refuses a rank that is not in the grid
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._meshes: dict[Family, DeviceMesh] = {}

    def size(self, axes: str) -> int:
        """How many ranks this rank's group along ``axes`` has; axes are named as for ``RankGrid``."""
        return self.grid.size(axes)

    def rank(self, axes: str) -> int:
        """The index of this rank in its group along ``axes``."""
        return self.grid.position(axes, self.global_rank)

    def group(self, axes: str) -> ProcessGroup | None:
        """This rank's group along ``axes``, made at the first call; None if this rank is alone in it."""
        return None if self.size(axes) == 1 else self._made(self.grid.group_of(axes, self.global_rank))

    def mesh(self, family: Family) -> DeviceMesh:
        """This pipeline stage's ranks as the mesh of a family of weights, of the groups above, made at the first call.

        Dense: (dp_replicate, dp_shard, tp), where dp_shard spans cp as well, for weights are the same on every rank of
        it. Expert: (edp_replicate, edp_shard, ep, etp). A dimension of size 1 has a group too: DTensor asks for it.
        """
        if family not in self._meshes:
            axes = _MESH_AXES[family]
            ranks = torch.empty([self.size(axis) for axis in axes.values()], dtype=torch.int)
            for rank in self.grid.group_of("-".join(axes.values()), self.global_rank):
                ranks[tuple(self.grid.position(axis, rank) for axis in axes.values())] = rank
            groups = [self._made(self.grid.group_of(axis, self.global_rank)) for axis in axes.values()]
            self._meshes[family] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=tuple(axes))
        return self._meshes[family]

    def collection(self) -> ProcessGroupCollection:
        """The groups that layers are built with; one process without torch.distributed gives ``single()``."""
        if not dist.is_initialized() and self.grid.world_size == 1:
            return ProcessGroupCollection.single()
        return ProcessGroupCollection(
            tp=self.group("tp"),
            cp=self.group("cp"),
            pp=self.group("pp"),
            dp=self.group("dp"),
            dp_cp=self.group("dp-cp"),
            ep=self.group("ep"),
            etp=self.group("etp"),
            edp=self.group("edp"),
            mesh=self.mesh("dense"),
            expert_mesh=self.mesh("expert"),
        )

    def _made(self, ranks: list[int]) -> ProcessGroup:
        """The group of ``ranks``: one for all axes that mean the same ranks."""
        if not dist.is_initialized() or dist.get_rank() != self.global_rank:
            here = f"rank {dist.get_rank()}" if dist.is_initialized() else "outside torch.distributed"
            raise TopologyError(
                f"the groups of rank {self.global_rank} can be made on that rank only, and this process is {here}; "
                f"call torch.distributed.init_process_group first, and leave rank=None"
            )
        if tuple(ranks) not in self._groups:
            self._groups[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[tuple(ranks)]


class _Current:
    """What ``use`` has set, for the whole process: threads that autograd starts see it as well."""

    state: ParallelState | None = None


_current = _Current()


@contextmanager
def use(state: ParallelState) -> Iterator[ParallelState]:
    """``state`` is current inside."""
    outer, _current.state = _current.state, state
    try:
        yield state
    finally:
        _current.state = outer


def current_parallel_state() -> ParallelState:
    """The state of the innermost ``use``. Raises TopologyError outside of any."""
    if _current.state is None:
        raise TopologyError(
            "no parallel state is current; wanted: with use(ParallelState(RankGrid(world_size, tensor=...))): ..."
        )
    return _current.state


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("tp")


def get_tensor_model_parallel_rank() -> int:
    return current_parallel_state().rank("tp")


def get_tensor_model_parallel_world_size() -> int:
    return current_parallel_state().size("tp")


def get_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup | None:
    return current_parallel_state().group(_data_axes(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return current_parallel_state().rank(_data_axes(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return current_parallel_state().size(_data_axes(with_context_parallel))


def get_context_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("cp")


def get_context_parallel_rank() -> int:
    return current_parallel_state().rank("cp")


def get_context_parallel_world_size() -> int:
    return current_parallel_state().size("cp")


def get_pipeline_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("pp")


def get_pipeline_model_parallel_rank() -> int:
    return current_parallel_state().rank("pp")


def get_pipeline_model_parallel_world_size() -> int:
    return current_parallel_state().size("pp")


def _data_axes(with_context_parallel: bool) -> str:
    return "dp-cp" if with_context_parallel else "dp"
