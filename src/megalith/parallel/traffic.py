"""What ranks exchange, computed from sizes alone, without process groups or tensors.

Collectives are counted on one rank, in bytes of the larger of the input and output buffers, as in nccl-tests:

    all_gather               the output: W times what each of the W ranks contributes
    reduce_scatter           the input: W times what each rank keeps
    all_reduce, all_to_all   the input, which is as large as the output
    send                     the message, on the sending rank

A ring algorithm sends (W - 1)/W of these bytes from each rank, and twice that for an all_reduce.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Axis", "Collective", "Passes", "Traffic", "collective", "enlarged", "repeated"]

# named as the settings of ``parallel``; "shard" is shard x context, over which FSDP2 shards, "data" is shard x
# replicate, and "edp" = edp_shard x edp_replicate is the ranks of a stage divided by expert x expert_tensor
Axis: TypeAlias = Literal[
    "tensor",
    "context",
    "pipeline",
    "shard",
    "replicate",
    "data",
    "expert",
    "expert_tensor",
    "edp",
    "edp_shard",
    "edp_replicate",
    "world",
]
_Kind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


class Collective(NamedTuple):
    """One collective or message: its axis, its kind and its size in bytes."""

    axis: Axis
    kind: _Kind
    num_bytes: int


# how often each collective is called
Traffic: TypeAlias = Counter[Collective]


@dataclass(frozen=True)
class Passes:
    """What a part of a model exchanges for a micro-batch in forward and backward; consecutive parts are added with +.

    ``unsaved``: the part of ``forward`` after the last tensor that is saved for backward. Recomputation stops there.
    """

    forward: Traffic = field(default_factory=Counter)
    backward: Traffic = field(default_factory=Counter)
    unsaved: Traffic = field(default_factory=Counter)

    def __add__(self, following: "Passes") -> "Passes":
        return Passes(self.forward + following.forward, self.backward + following.backward, following.unsaved)

    @property
    def recomputed(self) -> Traffic:
        """What is exchanged again if only this part is recomputed in backward."""
        return self.forward - self.unsaved


def collective(axis: Axis, kind: _Kind, num_bytes: int, num_ranks: int, times: int = 1) -> Traffic:
    """Returns a collective called ``times`` times; nothing for a group of one rank, or for zero bytes."""
    return Counter({Collective(axis, kind, num_bytes): times} if num_ranks > 1 and num_bytes and times else {})


def repeated(traffic: Traffic, times: int) -> Traffic:
    """Returns ``traffic`` repeated ``times`` times."""
    return Counter({each: number * times for each, number in traffic.items()})


def enlarged(traffic: Traffic, factor: int) -> Traffic:
    """Returns the same collectives with ``factor`` times the bytes each; nothing if ``factor`` is 0."""
    return Counter(
        {each._replace(num_bytes=factor * each.num_bytes): number for each, number in traffic.items() if factor}
    )
