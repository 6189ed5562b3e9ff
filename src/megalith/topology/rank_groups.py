"""This process's place in a layout: its lazily created groups, and the device meshes of FSDP2 and DTensor."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalith.errors import TopologyError
from megalith.topology.group_options import GroupOptions
from megalith.topology.process_groups_config import Family, ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.script_options import ScriptOptions
from megalith.torch_compat.distributed import new_group

__all__ = ["ParallelState"]

# family -> dimensions of its mesh, slowest first -> the axes of the grid that each spans
_MESH_AXES: dict[Family, dict[str, str]] = {
    "dense": {"dp_replicate": "dp_replicate", "dp_shard": "dp_shard-cp", "tp": "tp"},
    "expert": {"edp_replicate": "edp_replicate", "edp_shard": "edp_shard", "ep": "ep", "etp": "etp"},
}
# groups that do not correspond to axes, by their names in group_options
_EMBEDDING, _POSITION_EMBEDDING = "embd", "pos_embd"


class ParallelState:
    """The groups of one rank of a grid.

    Sizes and ranks need no torch.distributed. Groups and meshes do, and creating one is a collective over its members:
    all of them must request the same groups in the same order. Ranks are numbered as in the default group.

    Args:
        grid: the layout.
        rank: this process's rank; None: its rank in the default process group, or 0 without one.
        device_type: of the mesh, "cpu" or "cuda".
        rank_offset: the first rank of the grid, if several jobs share a world; None: the grid is the whole world.
        timeout: of collectives over all groups created here; None: torch's default.
        group_options: options by axes ("dp-cp", in any order; FSDP2 shards over "dp_shard-cp"), or by the names "embd"
            and "pos_embd"; groups not listed use those of the default group.
        script: options that only the accessors of ``parallel_state`` read.

    Raises:
        TopologyError: the default group has more ranks than the grid (without ``rank_offset``) or too few, ``rank`` is
            not in the grid, ``group_options`` names unknown axes, or ``script`` does not fit the grid.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int | None = None,
        device_type: str = "cpu",
        *,
        rank_offset: int | None = None,
        timeout: timedelta | None = None,
        group_options: Mapping[str, GroupOptions] | None = None,
        script: ScriptOptions | None = None,
    ) -> None:
        self.grid = grid
        self.device_type = device_type
        self.rank_offset = rank_offset or 0
        self.global_rank = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
        if rank is None:
            _check_world(grid, rank_offset)
        self._place = self.global_rank - self.rank_offset
        if not 0 <= self._place < grid.world_size:
            raise TopologyError(
                f"rank must be in [{self.rank_offset}, {self.rank_offset + grid.world_size}); got {self.global_rank}"
            )
        self.script = script or ScriptOptions()
        self.script.check(grid)
        pipeline = self.ranks("pp")
        self.embedding_ranks = self.script.embedding_ranks(pipeline)
        self.position_embedding_ranks = self.script.position_embedding_ranks(pipeline)
        self._default = GroupOptions(timeout=timeout)
        self._options = _by_axes(grid, group_options or {})
        self._groups: dict[tuple[tuple[int, ...], GroupOptions], ProcessGroup] = {}
        self._others: list[ProcessGroup] = []
        self._meshes: dict[Family, DeviceMesh] = {}

    def size(self, axes: str) -> int:
        """Returns the number of ranks in this rank's group along ``axes``, which are named as for ``RankGrid``."""
        return self.grid.size(axes)

    def rank(self, axes: str) -> int:
        """Returns the index of this rank in its group along ``axes``."""
        return self.grid.position(axes, self._place)

    def ranks(self, axes: str) -> list[int]:
        """Returns this rank's group along ``axes``, as ranks of the default group, ascending."""
        return self._of_world(self.grid.group_of(axes, self._place))

    def group(self, axes: str) -> ProcessGroup | None:
        """Returns this rank's group along ``axes``, created on first use; None if it consists of this rank alone."""
        return self._made_unless_alone(self.ranks(axes), self.grid.single_axes(axes))

    def another_group(self, ranks: Sequence[int], axes: str) -> ProcessGroup:
        """Creates one more group of ``ranks``, this one among them, with the options and the timeout of ``axes``.

        For messages that must not share a group with others. ``destroy`` destroys it too.
        """
        group = self._create(list(ranks), self._options.get(_key_of(self.grid, axes), GroupOptions()))
        self._others.append(group)
        return group

    def hierarchical_groups(self, axes: str, sizes: Sequence[int]) -> list[ProcessGroup | None]:
        """Returns this rank's groups along ``axes`` by levels of ``sizes``; see ``RankGrid.hierarchical_groups_of``."""
        levels = self.grid.hierarchical_groups_of(axes, sizes, self._place)
        return [self._made_unless_alone(self._of_world(level), self.grid.single_axes(axes)) for level in levels]

    def embedding_group(self) -> ProcessGroup | None:
        """Returns this pipeline's group of ranks with the embedding table. Raises TopologyError on other ranks."""
        return self._group_of_some(self.embedding_ranks, _EMBEDDING)

    def position_embedding_group(self) -> ProcessGroup | None:
        """Returns this pipeline's group of ranks with the position embeddings. Raises TopologyError on other ranks."""
        return self._group_of_some(self.position_embedding_ranks, _POSITION_EMBEDDING)

    def mesh(self, family: Family) -> DeviceMesh:
        """Returns the mesh of a family of weights over this pipeline stage's ranks, created on first use.

        Dense: (dp_replicate, dp_shard, tp), where dp_shard also spans cp, because weights are the same on all cp ranks.
        Expert: (edp_replicate, edp_shard, ep, etp). Dimensions of size 1 have a group too, because DTensor asks for it.
        """
        if family not in self._meshes:
            axes = _MESH_AXES[family]
            ranks = torch.empty([self.size(axis) for axis in axes.values()], dtype=torch.int)
            for place in self.grid.group_of("-".join(axes.values()), self._place):
                index = tuple(self.grid.position(axis, place) for axis in axes.values())
                ranks[index] = self.rank_offset + place
            groups = [self._made(self.ranks(axis), self.grid.single_axes(axis)) for axis in axes.values()]
            self._meshes[family] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=tuple(axes))
        return self._meshes[family]

    def collection(self, output_rank: int | None = None) -> ProcessGroupCollection:
        """Returns the groups that layers are built with; ``single()`` for one process without torch.distributed.

        ``output_rank``: the pp rank that holds the last stage; None: the last one.
        """
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
            output_rank=output_rank,
        )

    def destroy(self) -> None:
        """Destroys every group created here; meshes and anything built with them cannot be used afterwards.

        Groups requested later are created anew. No rank waits for another.
        """
        self._meshes.clear()
        self._others += self._groups.values()
        self._groups.clear()
        while self._others:
            group = self._others.pop()
            if dist.is_initialized():
                with suppress(ValueError):  # already destroyed with the default group
                    dist.destroy_process_group(group)

    def _of_world(self, places: Sequence[int]) -> list[int]:
        return [self.rank_offset + place for place in places]

    def _group_of_some(self, ranks: list[int], name: str) -> ProcessGroup | None:
        if self.global_rank not in ranks:
            raise TopologyError(
                f"rank {self.global_rank} is not in the group {name} of ranks {ranks}; request it only on those ranks"
            )
        return self._made_unless_alone(sorted(ranks), frozenset({name}))

    def _made_unless_alone(self, ranks: list[int], axes: frozenset[str]) -> ProcessGroup | None:
        return None if len(ranks) == 1 else self._made(ranks, axes)

    def _made(self, ranks: list[int], axes: frozenset[str]) -> ProcessGroup:
        """Returns the group of ``ranks`` with the options of ``axes``; equal ranks and options share one group."""
        options = self._options.get(axes, GroupOptions())
        key = tuple(ranks), options
        if key not in self._groups:
            self._groups[key] = self._create(ranks, options)
        return self._groups[key]

    def _create(self, ranks: list[int], options: GroupOptions) -> ProcessGroup:
        if not dist.is_initialized() or dist.get_rank() != self.global_rank:
            here = f"rank {dist.get_rank()}" if dist.is_initialized() else "outside torch.distributed"
            raise TopologyError(
                f"the groups of rank {self.global_rank} can be created only on that rank, but this process is {here}; "
                f"call torch.distributed.init_process_group first, and leave rank=None"
            )
        timeout = options.timeout or self._default.timeout
        pg_options = None if options.nccl is None else options.nccl.for_torch(timeout)
        return new_group(ranks, options.backend, timeout, pg_options)


def _check_world(grid: RankGrid, rank_offset: int | None) -> None:
    """Raises TopologyError if the grid does not fit into the default group, or must fill it and does not."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    room = world - grid.world_size
    if room < 0 or (room > 0 and rank_offset is None):
        raise TopologyError(
            f"the grid has {grid.world_size} ranks, but the world size is {world}; start {grid.world_size} "
            f"processes (torchrun --nproc-per-node), or change the layout"
        )
    if rank_offset is not None and not 0 <= rank_offset <= room:
        raise TopologyError(
            f"rank_offset ({rank_offset}) must be in [0, {room}], so that the {grid.world_size} ranks of the grid "
            f"fit in this world of {world}"
        )


def _by_axes(grid: RankGrid, group_options: Mapping[str, GroupOptions]) -> dict[frozenset[str], GroupOptions]:
    """Returns ``group_options`` keyed by the set of axes, so that their order does not matter."""
    found: dict[frozenset[str], GroupOptions] = {}
    for axes, options in group_options.items():
        key = _key_of(grid, axes)
        if key in found:
            raise TopologyError(f"group_options must name each group once; got {axes!r} a second time")
        found[key] = options
    return found


def _key_of(grid: RankGrid, axes: str) -> frozenset[str]:
    return frozenset({axes}) if axes in (_EMBEDDING, _POSITION_EMBEDDING) else grid.single_axes(axes)
