"""The process groups passed to layers, optimizers and losses; None stands for a group of this rank alone."""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalith.errors import TopologyError

__all__ = ["WEIGHT_AXES", "Axis", "Family", "ProcessGroupCollection"]

Axis = Literal["tp", "cp", "pp", "dp", "dp_cp", "ep", "etp", "edp"]
Family = Literal["dense", "expert"]

# the axes that may split a weight, outermost first; the mesh's data-parallel axes replicate and shard it
WEIGHT_AXES: dict[Family, tuple[Axis, ...]] = {"dense": ("tp",), "expert": ("ep", "etp")}


@dataclass(frozen=True, repr=False)
class ProcessGroupCollection:
    """This rank's groups, by their usual names, passed to constructors; a group of size 1 is None.

    torch.distributed reads None as the whole world: check ``size`` before calling it, or use the functions of
    ``topology.collectives``, which read None as this rank alone.

    Attributes:
        tp: splits each layer's weights; ``cp``: the sequence; ``pp``: the layers.
        dp: ranks that read different samples; ``dp_cp``: ranks with the same dense weights and different tokens.
        ep: splits the experts; ``etp``: each expert's weights; ``edp``: ranks with the same experts, different tokens.
        mesh: this stage's ranks for the DTensors and FSDP2 of dense weights, with the dimensions dp_replicate, dp_shard
            and tp, including those of size 1; None without torch.distributed.
        expert_mesh: the same ranks for expert weights: edp_replicate, edp_shard, ep and etp.
        output_rank: the pp rank that holds the last stage; None: the last one.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    edp: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    output_rank: int | None = None

    @classmethod
    def single(cls) -> "ProcessGroupCollection":
        """Returns the collection of a single process; does not need torch.distributed."""
        return cls()

    def size(self, axis: Axis) -> int:
        """Returns the number of ranks in this rank's group along ``axis``."""
        group: ProcessGroup | None = getattr(self, axis)
        return 1 if group is None else group.size()

    def rank(self, axis: Axis) -> int:
        """Returns the index of this rank in its group along ``axis``."""
        group: ProcessGroup | None = getattr(self, axis)
        return 0 if group is None else group.rank()

    @property
    def speaks_for_tokens(self) -> bool:
        """Whether this rank contributes its tokens and their loss to sums over the world.

        Among the ranks that see the same tokens, exactly one does: the first tp rank of the last stage, which has the
        loss.
        """
        output_rank = self.size("pp") - 1 if self.output_rank is None else self.output_rank
        return self.rank("tp") == 0 and self.rank("pp") == output_rank

    def sum_over_model_(self, x: Tensor) -> None:
        """Sums ``x`` in place over the ranks of this model, which are not the whole world if several jobs share it."""
        for group in (self.tp, self.pp, self.dp_cp):
            if group is not None:
                dist.all_reduce(x, group=group)

    def weight_mesh(self, family: Family) -> DeviceMesh:
        """Returns the mesh of a family's DTensors, with the dimensions ``WEIGHT_AXES[family]``."""
        mesh = self._root_mesh(family)
        return mesh["tp"] if family == "dense" else mesh["ep", "etp"]

    def data_mesh(self, family: Family) -> DeviceMesh:
        """Returns the mesh that FSDP2 shards a family over, preceded by a replicate dimension if its size exceeds 1."""
        mesh = self._root_mesh(family)
        replicate, shard = ("dp_replicate", "dp_shard") if family == "dense" else ("edp_replicate", "edp_shard")
        return mesh[shard] if mesh[replicate].size() == 1 else mesh[replicate, shard]

    def _root_mesh(self, family: Family) -> DeviceMesh:
        mesh = self.mesh if family == "dense" else self.expert_mesh
        if mesh is None:
            raise TopologyError(
                "DTensor and FSDP2 need a device mesh, but this collection was built without torch.distributed; "
                "start the process with torchrun, or call init_process_group and use ParallelState(grid).collection()"
            )
        return mesh

    def __repr__(self) -> str:
        axes: tuple[Axis, ...] = ("tp", "cp", "pp", "dp", "ep", "etp", "edp")
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in axes if self.size(axis) > 1)
        return f"ProcessGroupCollection({sizes})"
