"""The process groups that a layer, an optimizer or a loss is built with; one that is None has one rank, this one."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalith.errors import TopologyError

__all__ = ["ProcessGroupCollection"]


@dataclass(frozen=True, repr=False)
class ProcessGroupCollection:
    """This rank's groups, by the field's names, each None where its size is 1; handed to constructors.

    Attributes:
        tp: shares out each layer's weights.
        dp: sees other samples.
        mesh: this stage's ranks for DTensor and FSDP2, with the dimensions dp_replicate, dp_shard and tp, those of
            size 1 too; None without torch.distributed.
    """

    tp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    @classmethod
    def single(cls) -> "ProcessGroupCollection":
        """One process that is alone; torch.distributed need not be there."""
        return cls()

    @property
    def tp_size(self) -> int:
        return _size(self.tp)

    @property
    def tp_rank(self) -> int:
        return _rank(self.tp)

    @property
    def dp_size(self) -> int:
        return _size(self.dp)

    @property
    def dp_rank(self) -> int:
        return _rank(self.dp)

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The mesh of DTensors that tp splits: one dimension, tp."""
        return self._root_mesh()["tp"]

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: dp_shard, under dp_replicate where weights are replicated too."""
        mesh = self._root_mesh()
        return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]

    def _root_mesh(self) -> DeviceMesh:
        if self.mesh is None:
            raise TopologyError(
                "DTensor and FSDP2 need a device mesh, and this collection is of a process without torch.distributed; "
                "start it under torchrun, or call init_process_group and take ParallelState(grid).collection()"
            )
        return self.mesh

    def __repr__(self) -> str:
        return f"ProcessGroupCollection(tp={self.tp_size}, dp={self.dp_size})"


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
