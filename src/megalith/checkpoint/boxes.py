"""The part of a global tensor that a rank holds: a box, one half-open range of indices per dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.errors import CheckpointError, ShapeError
from megalith.parallel.local_ranges import local_ranges

__all__ = ["Box", "local_part"]


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
    try:
        box = Box(local_ranges(tensor))
    except ShapeError as error:
        raise CheckpointError(f"{name}: {error}") from error
    local: Tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if box.num_elements and box.shape != tuple(local.shape):
        raise CheckpointError(
            f"{name}: of shape {list(tensor.shape)} this rank should hold {list(box.shape)} by its placements, "
            f"and its local tensor is {list(local.shape)}; make it with distribute_tensor or fully_shard"
        )
    return box, local
