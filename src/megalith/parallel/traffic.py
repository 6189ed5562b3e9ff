"""What ranks exchange, counted from sizes alone: no process group, no tensor.

Collectives are counted on one rank, with the bytes of the buffer that is larger there, as NCCL's tests count them:

    all_gather               what it gives: W times what each of the W ranks adds
    reduce_scatter           what it takes: W times what each rank keeps
    all_reduce, all_to_all   what it takes, which is as much as it gives
    send                     the message, on the rank that sends it

An algorithm over a ring sends (W - 1)/W of these bytes from each rank, and for an all_reduce twice that.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Axis", "Collective", "Passes", "Traffic", "collective", "enlarged", "repeated"]

# as the settings of ``parallel`` call them; "shard" is shard x context, over which FSDP2 shards, "data" is shard x
# replicate, and "edp" what ranks of expert and expert_tensor leave of a stage, sharded and replicated too
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
    """One collective, or one message: over which ranks, and of how many bytes."""

    axis: Axis
    kind: _Kind
    num_bytes: int


# how many there are of each
Traffic: TypeAlias = Counter[Collective]


@dataclass(frozen=True)
class Passes:
    """What a part of a model exchanges for a micro-batch, forward and backward; parts add up in their order.

    ``unsaved``: what of ``forward`` follows the last tensor that is saved for backward. Recomputation ends before it.
    """

    forward: Traffic = field(default_factory=Counter)
    backward: Traffic = field(default_factory=Counter)
    unsaved: Traffic = field(default_factory=Counter)

    def __add__(self, following: "Passes") -> "Passes":
        return Passes(self.forward + following.forward, self.backward + following.backward, following.unsaved)

    @property
    def recomputed(self) -> Traffic:
        """What is exchanged once more where this part alone is computed again in backward."""
        return self.forward - self.unsaved


def collective(axis: Axis, kind: _Kind, num_bytes: int, num_ranks: int, times: int = 1) -> Traffic:
    """``times`` one collective; nothing over a group of one rank, or of no bytes."""
    return Counter({Collective(axis, kind, num_bytes): times} if num_ranks > 1 and num_bytes and times else {})


def repeated(traffic: Traffic, times: int) -> Traffic:
    """``traffic``, ``times`` over."""
    return Counter({each: number * times for each, number in traffic.items()})


def enlarged(traffic: Traffic, factor: int) -> Traffic:
    """As many collectives, of ``factor`` times the bytes; none of no bytes."""
    return Counter(
        {each._replace(num_bytes=factor * each.num_bytes): number for each, number in traffic.items() if factor}
    )
