"""What FSDP2 exchanges for a unit, that is, for weights that are gathered together in one flat buffer.

    all_gather       over shard x context, in the compute dtype, each time the unit is gathered
    reduce_scatter   over shard x context, in the reduction dtype, once a step
    all_reduce       over replicate, of the output of the reduce_scatter, once a step
    all_reduce       over tensor, in the reduction dtype, once a step for each weight whose gradient is partial over tp

Experts are separate units, over edp_shard and edp_replicate. The sharded dimension is padded to a multiple of the
number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from megalith.config.layout import Layout
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.sharding.fsdp import sharded_dimension
from megalith.parallel.traffic import Traffic, collective

__all__ = ["Sharding", "Weight"]


@dataclass(frozen=True)
class Weight:
    """A parameter before any split; ``split``: the dimension that tp splits, None if it is replicated.

    ``partial``: each rank of tp uses only some tokens or rows, so that the gradients of the ranks must be summed.
    """

    shape: tuple[int, ...]
    split: int | None = None
    partial: bool = False


@dataclass(frozen=True)
class Sharding:
    """How weights are sharded on rank ``tp_rank`` of tp, and the dtypes of computation and reduction."""

    layout: Layout
    tp_rank: int
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def num_shards(self) -> int:
        """The number of shards of each tp part of the weights; ranks of context hold shards too."""
        return self.layout.shard * self.layout.context

    def unit_traffic(self, weights: Sequence[Weight], num_gathers: int) -> Traffic:
        """Returns what a step exchanges for a unit of ``weights`` that is gathered ``num_gathers`` times."""
        shards, reduced = self.num_shards, self.reduce_dtype.itemsize
        padded = sum(prod(self._shard(weight, index=0)) for weight in weights) * shards
        found = collective("shard", "all_gather", padded * self.compute_dtype.itemsize, shards, num_gathers)
        found += collective("shard", "reduce_scatter", padded * reduced, shards)
        found += collective("replicate", "all_reduce", padded // shards * reduced, self.layout.replicate)
        terms = [prod(self._of_tp(weight)) * reduced for weight in weights if weight.partial]
        return sum((collective("tensor", "all_reduce", size, self.layout.tensor) for size in terms), start=found)

    def expert_unit_traffic(self, weights: Sequence[Weight], num_gathers: int) -> Traffic:
        """``unit_traffic`` of experts [E, ...]; ep splits dimension 0, and etp dimension ``split``."""
        layout, shards, reduced = self.layout, self.layout.edp_shard, self.reduce_dtype.itemsize
        num_elements = 0
        for weight in weights:
            assert weight.split is not None, "etp splits every weight of experts"
            sizes = list(weight.shape)
            sizes[0] //= layout.expert
            sizes[weight.split] //= layout.expert_tensor
            degrees = {0: layout.expert, weight.split: layout.expert_tensor}
            # the dimension is chosen from the whole weight, as when a model is built, then applied to this rank's part
            sharded = sharded_dimension(weight.shape, {dim for dim, degree in degrees.items() if degree > 1}, shards)
            num_elements += prod(_part(sizes, sharded, shards, index=0))  # the largest part; others are padded to it
        found = collective(
            "edp_shard", "all_gather", num_elements * shards * self.compute_dtype.itemsize, shards, num_gathers
        )
        found += collective("edp_shard", "reduce_scatter", num_elements * shards * reduced, shards)
        return found + collective("edp_replicate", "all_reduce", num_elements * reduced, layout.edp_replicate)

    def shard_bytes(self, weight: Weight, index: int) -> int:
        """Returns the bytes of the gradient shard of ``weight`` on shard rank ``index``, without padding."""
        return prod(self._shard(weight, index)) * self.reduce_dtype.itemsize

    def _of_tp(self, weight: Weight) -> list[int]:
        return _part(weight.shape, weight.split, self.layout.tensor, self.tp_rank)

    def _shard(self, weight: Weight, index: int) -> list[int]:
        """Returns the shape of rank ``index``'s part. Rank 0 has the largest; FSDP2 pads the others to it."""
        split = set() if weight.split is None or self.layout.tensor == 1 else {weight.split}
        dim = sharded_dimension(weight.shape, split, self.num_shards)
        return _part(self._of_tp(weight), dim, self.num_shards, index)


def _part(shape: Sequence[int], dim: int | None, parts: int, index: int) -> list[int]:
    sizes = list(shape)
    if dim is not None:
        first, end = chunk_range(sizes[dim], parts, index)
        sizes[dim] = end - first
    return sizes
