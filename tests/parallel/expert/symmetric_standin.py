"""A stand-in for torch's symmetric memory over any process group: its documented interface, by all-to-alls.

Memory that must not be read is NaN: fresh allocations, gaps, and rows after the last. A tensor that was written without
the barriers around the kernel that reads it fails the call.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class StandInMemory:
    """A ``SymmetricMemory`` whose peers exchange messages."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.tensors: list[Tensor] = []
        self.at_barrier: dict[int, int] = {}  # each tensor's version at the last barrier
        self.being_read: list[tuple[Tensor, int]] = []  # what peers read until the next barrier, and its version
        self.counts: Tensor | None = None  # which peers may write to from then on
        self.met: set[int] = set()  # tensors that peers know
        self.team = False

    def size(self) -> int:
        return self.group.size()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shapes: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(shapes, (shape, dtype))
        assert len(set(shapes)) == 1, f"all ranks of the world allocate alike; got {shapes}"
        self.tensors.append(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))
        return self.tensors[-1]

    def rendezvous(self, tensor: Tensor) -> None:
        assert any(tensor is mine for mine in self.tensors), "of this memory, and no view of it"
        self.met.add(id(tensor))
        dist.barrier(self.group)

    def barrier(self) -> None:
        for tensor, version in self.being_read:
            assert tensor._version == version, "written while peers read it"
        dist.barrier(self.group)
        if self.counts is not None:
            self.counts.fill_(-1)
        self.being_read, self.counts = [], None
        self.at_barrier = {id(tensor): tensor._version for tensor in self.tensors}

    def all_to_all_vdev_2d(self, x: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        if not self.team:  # nvshmem_team_split_strided(NVSHMEM_TEAM_WORLD, ...) waits for all ranks of the world
            dist.barrier()
            self.team = True
        W, E = self.size(), len(splits)
        assert splits.sum() <= len(x)
        self._begin(x, out, splits, out_splits_offsets)
        blocks = self._exchange([list(part.split(n)) for part, n in _parts(x, splits.view(W, -1).tolist())])
        counts, offsets, row = [], [], 0
        for e in range(E // W):
            begin = row
            for block in (blocks[source][e] for source in range(W)):
                counts.append(len(block))
                offsets.append(row)
                out[row : row + len(block)] = block
                row += len(block)
            row = max(row, begin + 1)  # an expert without rows has a block of one
        assert row <= len(out), "the buffer has room for the worst case"
        self._end(x, out_splits_offsets, counts, offsets)

    def all_to_all_vdev_2d_offset(
        self, x: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        W = self.size()
        self._begin(x, out, splits_offsets, out_splits_offsets)
        pieces = [
            x[begin : begin + count] for count, begin in splits_offsets.T.tolist()
        ]  # from each expert, to each rank
        blocks = self._exchange([pieces[to::W] for to in range(W)])
        counts = [len(block) for source in blocks for block in source]
        offsets = [sum(counts[:i]) for i in range(len(counts))]
        out[: sum(counts)] = torch.cat([block for source in blocks for block in source])
        self._end(x, out_splits_offsets, counts, offsets)

    def _begin(self, x: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor) -> None:
        for tensor in (x, out, splits, out_splits):
            assert id(tensor) in self.met, "each is symmetric memory that peers know, and no view of it"
        assert (x.dtype, x.stride(0)) == (out.dtype, out.stride(0))
        assert splits.dtype == out_splits.dtype == torch.int64
        assert self.counts is None, "no barrier since the last exchange"
        for tensor in (x, splits):
            assert tensor._version == self.at_barrier.get(id(tensor)), "no barrier since it was written"
        out.fill_(float("nan"))

    def _end(self, x: Tensor, out_splits: Tensor, counts: list[int], offsets: list[int]) -> None:
        out_splits.copy_(torch.tensor([counts, offsets]))
        self.being_read, self.counts = [(x, x._version)], out_splits

    def _exchange(self, blocks: list[list[Tensor]]) -> list[list[Tensor]]:
        """Sends ``blocks[rank]`` to each rank; returns what each rank sent here."""
        sent: list[list[list[Tensor]]] = [[] for _ in range(self.size())]
        dist.all_gather_object(sent, [[block.clone() for block in to] for to in blocks], group=self.group)
        return [each[self.group.rank()] for each in sent]


def _parts(x: Tensor, counts: list[list[int]]) -> list[tuple[Tensor, list[int]]]:
    """The rows of ``x`` for each rank, and how many of them are for each of its experts."""
    sizes = [sum(each) for each in counts]
    return list(zip(x[: sum(sizes)].split(sizes), counts, strict=True))
