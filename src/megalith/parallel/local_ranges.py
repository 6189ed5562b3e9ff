"""Which part of a tensor a rank holds, as one half-open range per dimension.

Dimensions are split as by torch.chunk: every part has ceil(n / parts) elements, the last ones fewer or none. If a
second mesh dimension shards the same tensor dimension, it splits the part again. FSDP2 does so on a dimension that tp
already shards (a column-parallel bias), although FSDP2's dimension is to the left of tp in the mesh. torch marks this
placement ``_StridedShard``; the part is still one contiguous range.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.errors import ShapeError

__all__ = ["Ranges", "chunk_range", "local_ranges", "ranges_of_placements"]

Ranges = tuple[tuple[int, int], ...]


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the half-open range of part ``index`` when ``size`` elements are split as by torch.chunk."""
    length = -(-size // parts)
    return min(index * length, size), min((index + 1) * length, size)


def local_ranges(tensor: Tensor) -> Ranges:
    """Returns the range of global indices of ``tensor`` that this rank holds, per dimension; all for a plain tensor.

    A rank outside a DTensor's mesh holds nothing. Raises ShapeError like ``ranges_of_placements``.
    """
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return tuple((0, 0) for _ in tensor.shape)
    return ranges_of_placements(tensor.shape, tensor.device_mesh.shape, coordinates, tensor.placements)


def ranges_of_placements(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinates: Sequence[int], placements: Sequence[Placement]
) -> Ranges:
    """Returns the ranges of the rank at ``coordinates`` of a mesh, given one placement per mesh dimension.

    Raises:
        ShapeError: a placement that is neither replicated nor one contiguous range.
    """
    ranges = [(0, size) for size in shape]
    # a strided placement was applied after the mesh dimensions to its right, so those come first
    order = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], _StridedShard))
    for i in order:
        placement = placements[i]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ShapeError(
                f"a tensor with placement {placement} has no contiguous range per rank; redistribute it to Shard first"
            )
        start, stop = ranges[placement.dim]
        inner = chunk_range(stop - start, mesh_shape[i], coordinates[i])
        ranges[placement.dim] = (start + inner[0], start + inner[1])
    return tuple(ranges)
