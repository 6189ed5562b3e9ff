"""The part of a global tensor that a rank holds: a box, one half-open range of indices per dimension."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.errors import CheckpointError, ShapeError
from megalith.parallel.local_ranges import local_ranges

__all__ = ["Box", "first_miscount", "local_part"]

_MOST_CUT_DIMENSIONS = 8  # a device mesh of the house has five axes, and each cuts one dimension


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

    def permuted(self, dims: Sequence[int]) -> "Box":
        """The same part of the tensor whose dimensions are in the order ``dims``, as ``Tensor.permute`` has it."""
        return Box(tuple(self.ranges[d] for d in dims))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds ``outer``."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def first_miscount(whole: Box, boxes: Iterable[Box]) -> tuple[tuple[int, ...], int] | None:
    """The first element that is not in exactly one of ``boxes``, and in how many it is; None if they tile ``whole``.

    A box is an indicator function, and its mixed derivative is +1 or -1 at each of its corners. Boxes tile ``whole`` if
    and only if their corners add up to its corners, so the time is linear in the number of boxes and no pair of them is
    compared. Where corners remain, the lexicographically first one is where the count first differs from 1.

    Raises:
        CheckpointError: ``whole`` is cut along more dimensions than any layout cuts.
    """
    pieces = list(boxes)
    if pieces == [whole] or (whole.num_elements == 0 and not pieces):
        return None
    cut = [d for d, ends in enumerate(whole.ranges) if any(piece.ranges[d] != ends for piece in pieces)]
    # a box has 2 ** dimensions corners, and an index may have been written by anyone
    if len(cut) > _MOST_CUT_DIMENSIONS:
        raise CheckpointError(f"a tensor may be cut along at most {_MOST_CUT_DIMENSIONS} dimensions; got {len(cut)}")
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [(whole, -1), *((piece, 1) for piece in pieces)]:
        ends = [((box.ranges[d][0], 1), (box.ranges[d][1], -1)) for d in cut]
        for corner in product(*ends):
            corners[tuple(place for place, _ in corner)] += weight * prod(sign for _, sign in corner)
    excess = min((place for place, count in corners.items() if count), default=None)
    if excess is None:
        return None
    first = [start for start, _ in whole.ranges]
    for d, place in zip(cut, excess, strict=True):
        first[d] = place
    return tuple(first), corners[excess] + 1


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
