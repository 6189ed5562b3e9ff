"""Which part of a global tensor a rank holds: a box, one half-open range of indices per dimension.

Shard(d) over n ranks cuts dimension d as torch.chunk does: pieces of ceil(size / n), the last ones shorter or empty. A
second mesh dimension that shards the same dimension cuts the piece again. Source: the docstring of
torch.distributed.tensor.Shard, and DTensor's order of placements, from left to right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from megalith.errors import CheckpointError

__all__ = ["Box", "box_of_placements", "local_part"]


@dataclass(frozen=True, order=True)
class Box:
    """``ranges[d] = (start, stop)`` in dimension d of the global tensor; a scalar has no ranges and one element."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor of ``shape``."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of this part."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def num_elements(self) -> int:
        """How many elements it has; 0 for an empty box."""
        return prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """What both boxes hold, or None."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        both = Box(tuple((max(mine[0], its[0]), min(mine[1], its[1])) for mine, its in pairs))
        return both if all(start < stop for start, stop in both.ranges) else None

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds ``outer``."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def local_part(name: str, tensor: Tensor) -> tuple[Box, Tensor]:
    """The box of ``tensor`` that this rank holds, and the local tensor with those elements (no copy, no gradient).

    A plain tensor is whole on each rank that has it. The box of a rank outside a DTensor's mesh is empty.

    Raises:
        CheckpointError: a placement that no box describes; the message says why.
    """
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape), tensor.detach()
    local: Tensor = tensor.to_local().detach()
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return Box(tuple((0, 0) for _ in tensor.shape)), local
    box = box_of_placements(name, tensor.shape, tensor.device_mesh.shape, coordinates, tensor.placements)
    if box.num_elements and box.shape != tuple(local.shape):
        raise CheckpointError(
            f"{name}: placements {tensor.placements} of shape {list(tensor.shape)} give this rank {list(box.shape)}, "
            f"and its local tensor is {list(local.shape)}; make it with distribute_tensor or fully_shard"
        )
    return box, local


def box_of_placements(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinates: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """The box of the rank at ``coordinates`` of a mesh. Raises CheckpointError for placements other than
    Shard and Replicate."""
    ranges = [(0, size) for size in shape]
    for num_pieces, coordinate, placement in zip(mesh_shape, coordinates, placements, strict=True):
        if placement.is_replicate():
            continue
        dim = _plain_shard(name, placement).dim
        start, stop = ranges[dim]
        piece = -(-(stop - start) // num_pieces)
        ranges[dim] = (min(start + coordinate * piece, stop), min(start + (coordinate + 1) * piece, stop))
    return Box(tuple(ranges))


def _plain_shard(name: str, placement: Placement) -> Shard:
    if type(placement) is Shard:  # not isinstance: in older torch _StridedShard is a subclass
        return placement
    if type(placement).__name__ == "_StridedShard":
        raise CheckpointError(
            f"{name}: FSDP and tensor parallelism shard one dimension, so a rank's part is not one box ({placement}); "
            "give FSDP another dimension with fully_shard(..., shard_placement_fn=...)"
        )
    if placement.is_partial():
        raise CheckpointError(f"{name}: {placement} holds unreduced sums; redistribute it to Shard or Replicate first")
    raise CheckpointError(f"{name}: placements must be Shard or Replicate; got {placement}")
