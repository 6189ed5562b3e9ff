"""Which part of a tensor a rank holds, as one half-open range per dimension.

A split is torch.chunk's: every part has ceil(n / parts) elements, the last ones fewer or none. FSDP2 over a dimension
that tp shards already (a column-parallel bias) splits each tp part again: torch marks that ``_StridedShard``, and it
still is one contiguous range.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.errors import ShapeError

__all__ = ["Box", "local_box", "split_evenly"]

Box = tuple[tuple[int, int], ...]


def split_evenly(size: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of part ``index`` when ``size`` elements are cut as torch.chunk cuts them."""
    length = -(-size // parts)
    return min(index * length, size), min((index + 1) * length, size)


def local_box(tensor: Tensor) -> Box:
    """The range of global indices, per dimension, that this rank holds of ``tensor``; all of it for a plain tensor.

    Raises:
        ShapeError: a placement that is neither replicated nor one contiguous range.
    """
    box = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(box)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank only meets tensors of meshes that it belongs to"
    # a strided placement was cut after the mesh dimensions to its right, so those come first
    strided = [i for i, placement in enumerate(tensor.placements) if isinstance(placement, _StridedShard)]
    plain = [i for i in range(len(tensor.placements)) if i not in strided]
    for i in (*plain, *strided):
        placement = tensor.placements[i]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ShapeError(f"a tensor placed {placement} has no range of its own; redistribute it to Shard first")
        start, stop = box[placement.dim]
        inner = split_evenly(stop - start, tensor.device_mesh.size(i), coordinate[i])
        box[placement.dim] = (start + inner[0], start + inner[1])
    return tuple(box)
