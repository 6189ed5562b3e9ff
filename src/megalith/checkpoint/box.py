"""The part of a global tensor that a rank holds: a box, one half-open index range per dimension."""

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

_MOST_CUT_DIMENSIONS = 8  # above the axes of any device mesh (at most four), each of which splits one dimension


@dataclass(frozen=True, order=True)
class Box:
    """``ranges[d] = (start, stop)`` in dimension d of the global tensor; a scalar has no ranges and one element."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Returns the box of an entire tensor of ``shape``."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def num_elements(self) -> int:
        """The number of elements; 0 for an empty box."""
        return prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Returns the intersection of both boxes, or None if it is empty."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        both = Box(tuple((max(mine[0], its[0]), min(mine[1], its[1])) for mine, its in pairs))
        return both if all(start < stop for start, stop in both.ranges) else None

    def permuted(self, dims: Sequence[int]) -> "Box":
        """Returns the same box after ``Tensor.permute(dims)`` of the global tensor."""
        return Box(tuple(self.ranges[d] for d in dims))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Returns the slices that select this box from a tensor that holds ``outer``."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def first_miscount(whole: Box, boxes: Iterable[Box]) -> tuple[tuple[int, ...], int] | None:
    """Returns the first element not in exactly one of ``boxes`` and its count; None if they tile ``whole``.

    A box is an indicator function, and its mixed derivative is +1 or -1 at each of its corners. Boxes tile ``whole`` if
    and only if their corners sum to its corners, so the time is linear in the number of boxes and no two of them are
    compared. If corners remain, the lexicographically first one is where the count first differs from 1.

    Raises:
        CheckpointError: ``whole`` is split along more dimensions than any layout splits.
    """
    pieces = list(boxes)
    if pieces == [whole] or (whole.num_elements == 0 and not pieces):
        return None
    cut = [d for d, ends in enumerate(whole.ranges) if any(piece.ranges[d] != ends for piece in pieces)]
    # a box has 2 ** dimensions corners, and the index is untrusted
    if len(cut) > _MOST_CUT_DIMENSIONS:
        raise CheckpointError(f"a tensor may be split along at most {_MOST_CUT_DIMENSIONS} dimensions; got {len(cut)}")
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
    """Returns this rank's box of ``tensor`` and the local tensor with its elements (no copy, no gradient).

    A plain tensor is whole on every rank that has it. On a rank outside a DTensor's mesh, the box is empty.

    Raises:
        CheckpointError: the placement cannot be described by a box; the message says why.
    """
    try:
        box = Box(local_ranges(tensor))
    except ShapeError as error:
        raise CheckpointError(f"{name}: {error}") from error
    local: Tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if box.num_elements and box.shape != tuple(local.shape):
        raise CheckpointError(
            f"{name}: the local tensor must have shape {list(box.shape)}, this rank's part of {list(tensor.shape)} "
            f"according to its placements; got {list(local.shape)}; create it with distribute_tensor or fully_shard"
        )
    return box, local
