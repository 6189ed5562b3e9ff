"""The number of ranks along each axis of a world: the only place where it is computed.

    dense    tensor x context x pipeline x replicate x shard = world_size
    expert   expert_tensor x expert x pipeline x edp_replicate x edp_shard = world_size

``shard=-1`` takes the ranks that the other dense degrees leave. The ranks that the expert degrees leave are the data
parallelism of the experts, edp, which is replicated gcd(replicate, edp) times and sharded for the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Self, TypedDict

from megalith.errors import TopologyError

__all__ = ["Degrees", "Layout"]


class Degrees(TypedDict, total=False):
    """The degrees that ``Layout.resolve`` takes, by name."""

    tensor: int
    context: int
    pipeline: int
    replicate: int
    shard: int
    expert: int
    expert_tensor: int | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The resolved degree of every axis; created by ``resolve``, which checks that they multiply to the world size.

    Attributes:
        edp_shard, edp_replicate: ranks over which experts are sharded, and copies of those shards.
    """

    tensor: int
    context: int
    pipeline: int
    replicate: int
    shard: int
    expert: int
    expert_tensor: int
    edp_shard: int
    edp_replicate: int

    @classmethod
    def resolve(
        cls,
        world_size: int | None = None,
        *,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        replicate: int = 1,
        shard: int = -1,
        expert: int = 1,
        expert_tensor: int | None = None,
    ) -> Self:
        """Returns the layout of ``world_size`` ranks; None: of as many ranks as the product of the dense degrees.

        Args:
            world_size: number of ranks; needed for ``shard=-1``.
            tensor, context, pipeline, replicate, shard, expert: degrees; ``shard=-1`` takes the remaining ranks.
            expert_tensor: tensor parallelism of the experts; None: the same as ``tensor``.

        Raises:
            TopologyError: degrees that are not positive integers, or whose product is not the world size.
        """
        given = {} if expert_tensor is None else {"expert_tensor": expert_tensor}
        dense = {"tensor": tensor, "context": context, "pipeline": pipeline, "replicate": replicate}
        world = {} if world_size is None else {"world_size": world_size}
        _check_degrees({**world, **dense, "expert": expert, **given}, shard)
        if world_size is None:
            if shard == -1:
                raise TopologyError(
                    "shard=-1 takes the remaining ranks of the world; give world_size, or the degree of shard"
                )
            world_size = prod(dense.values()) * shard
        left = _what_is_left(world_size, dense)
        if shard not in (-1, left):
            raise TopologyError(
                f"{_written({**dense, 'shard': shard})} must equal world_size ({world_size}); "
                f"use shard={left}, or -1 for the remaining ranks"
            )
        experts = {"expert_tensor": given.get("expert_tensor", tensor), "expert": expert, "pipeline": pipeline}
        edp = _what_is_left(world_size, experts)
        edp_replicate = gcd(replicate, edp)
        return cls(**{**dense, **experts}, shard=left, edp_shard=edp // edp_replicate, edp_replicate=edp_replicate)

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tensor * self.context * self.pipeline * self.data_parallel

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard


def _check_degrees(degrees: Mapping[str, object], shard: object) -> None:
    """Raises TopologyError for all invalid degrees at once. A bool is rejected, although it is an int in Python."""
    wrong = {name: degree for name, degree in degrees.items() if type(degree) is not int or degree < 1}
    if type(shard) is not int or (shard < 1 and shard != -1):
        wrong["shard"] = shard
    if wrong:
        raise TopologyError(
            f"sizes must be positive integers (shard may be -1, which takes the remaining ranks); got "
            f"{', '.join(f'{name}={degree!r}' for name, degree in wrong.items())}; "
            "use 1 for an unused axis"
        )


def _what_is_left(world_size: int, degrees: Mapping[str, int]) -> int:
    """Returns the degree of the last axis of a factorization, given the others."""
    taken = prod(degrees.values())
    if world_size % taken:
        raise TopologyError(
            f"{_written(degrees)} must divide world_size ({world_size}); "
            f"use sizes whose product divides it, or a multiple of {taken} ranks"
        )
    return world_size // taken


def _written(degrees: Mapping[str, int]) -> str:
    """For instance "tensor (2) x pipeline (3) = 6"."""
    return f"{' x '.join(f'{name} ({degree})' for name, degree in degrees.items())} = {prod(degrees.values())}"
