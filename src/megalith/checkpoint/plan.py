"""Decides which rank writes what: every element once, with replicas assigned so that file sizes come out even."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch

from megalith.checkpoint.box import Box, first_miscount
from megalith.checkpoint.index import Piece, StoredTensor, key_of
from megalith.checkpoint.shard_header import DTYPES
from megalith.errors import CheckpointError

__all__ = ["Offer", "SavePlan", "plan_of", "shard_name"]


@dataclass(frozen=True)
class Offer:
    """A rank's part ``box``, possibly empty, of a tensor of global ``shape`` and ``dtype`` (torch's name)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box


@dataclass(frozen=True)
class SavePlan:
    """The index of the checkpoint to write, the names whose boxes each rank writes, and the size of all elements."""

    tensors: dict[str, StoredTensor]
    names_by_rank: list[list[str]]
    num_bytes: int

    def files(self) -> set[str]:
        """Returns the names of all shard files; a rank with nothing to write has none."""
        num_ranks = len(self.names_by_rank)
        return {shard_name(rank, num_ranks) for rank, names in enumerate(self.names_by_rank) if names}


def shard_name(rank: int, num_ranks: int) -> str:
    """Returns the name of the file that ``rank`` writes."""
    return f"shard-{rank:05}-of-{num_ranks:05}.safetensors"


def plan_of(offers_by_rank: list[list[Offer]]) -> SavePlan:
    """Returns the plan for what all ranks offer; equal boxes of one tensor are assumed to hold equal values.

    Raises:
        CheckpointError: a name or dtype that the format cannot hold, ranks that disagree about a tensor, or boxes that
            do not tile it.
    """
    tensors: dict[str, Offer] = {}
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, offers in enumerate(offers_by_rank):
        for offer in offers:
            first = tensors.setdefault(offer.name, offer)
            if (first.shape, first.dtype) != (offer.shape, offer.dtype):
                raise CheckpointError(
                    f"{offer.name} is {first.dtype} {list(first.shape)} on one rank and {offer.dtype} "
                    f"{list(offer.shape)} on rank {rank}; a tensor that differs between ranks must be a DTensor"
                )
            if offer.box.num_elements:
                holders[offer.name, offer.box].append(rank)
    for name, offer in tensors.items():
        _check_format(name, offer)

    num_ranks = len(offers_by_rank)
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    names_by_rank: list[list[str]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    num_bytes = {(name, box): box.num_elements * _itemsize(tensors[name].dtype) for name, box in holders}
    for name, box in sorted(holders, key=lambda piece: (-num_bytes[piece], piece)):
        writer = min(holders[name, box], key=lambda rank: (load[rank], rank))
        load[writer] += num_bytes[name, box]
        names_by_rank[writer].append(name)
        file = shard_name(writer, num_ranks)
        pieces[name].append(Piece(file, key_of(name, tensors[name].shape, box), box))
    stored = {name: _stored(name, offer, pieces[name]) for name, offer in tensors.items()}
    return SavePlan(stored, names_by_rank, sum(load))


def _stored(name: str, offer: Offer, pieces: list[Piece]) -> StoredTensor:
    wanted, held = prod(offer.shape), sum(piece.box.num_elements for piece in pieces)
    if held != wanted:
        raise CheckpointError(
            f"{name} has {wanted} elements, but the ranks together hold {held}, in {len(pieces)} boxes"
        )
    if miscount := first_miscount(Box.whole(offer.shape), (piece.box for piece in pieces)):
        element, count = miscount
        raise CheckpointError(
            f"each element of {name} must be in exactly one of the {len(pieces)} boxes that the ranks hold; "
            f"{list(element)} is in {count}"
        )
    return StoredTensor(offer.shape, offer.dtype, tuple(sorted(pieces, key=lambda piece: piece.box)))


def _check_format(name: str, offer: Offer) -> None:
    if "@" in name or name == "__metadata__":
        raise CheckpointError(f"a tensor may not be named {name!r}: '@' and '__metadata__' are reserved; rename it")
    if offer.dtype not in DTYPES:
        raise CheckpointError(f"{name}: dtype must be one of {', '.join(DTYPES)}; got {offer.dtype}")


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size
