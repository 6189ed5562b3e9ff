"""Which rank sits where: one world factorised along named axes, in two ways, in pure Python.

    dense    tp, cp, dp = dp_replicate x dp_shard, pp    weights that every token passes
    expert   etp, ep, edp, pp                            experts: the same ranks, cut another way

The leftmost axis of the order varies fastest: rank = sum of coordinate * stride, where the stride of an axis is the
product of the sizes to its left. In the order string tp stands for etp too, and dp for dp_shard (faster), dp_replicate,
and edp; the dense factorisation passes over ep, and the expert one over cp. The convention is Megatron's.
"""

from collections.abc import Mapping
from itertools import product
from math import prod

from megalith.errors import TopologyError

__all__ = ["RankGrid"]

# what each token of the order stands for, fastest axis first
_DENSE = {"tp": ("tp",), "cp": ("cp",), "ep": (), "dp": ("dp_shard", "dp_replicate"), "pp": ("pp",)}
_EXPERT = {"tp": ("etp",), "cp": (), "ep": ("ep",), "dp": ("edp",), "pp": ("pp",)}


class RankGrid:
    """The coordinates of every rank of a world, and the groups of ranks along any axes.

    Axes are named alone or joined by hyphens, in any sequence: "tp", "dp-cp", "etp-ep". They are those of one
    factorisation: tp, cp, dp (or its parts dp_replicate and dp_shard) and pp, or etp, ep, edp and pp.

    Args:
        world_size: number of ranks.
        tensor, context, pipeline, replicate, shard, expert: sizes of tp, cp, pp, dp_replicate, dp_shard and ep;
            ``shard=-1`` takes what is left of the world, and so does edp always.
        expert_tensor: size of etp; None: that of tp.
        order: which axis varies fastest, from left to right; axes of size 1 may be left out.

    Raises:
        TopologyError: sizes that are not positive integers, or whose product is not the world; a wrong ``order``.
    """

    def __init__(
        self,
        world_size: int,
        *,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        replicate: int = 1,
        shard: int = -1,
        expert: int = 1,
        expert_tensor: int | None = None,
        order: str = "tp-cp-ep-dp-pp",
    ) -> None:
        given = {} if expert_tensor is None else {"expert_tensor": expert_tensor}
        dense = {"tensor": tensor, "context": context, "pipeline": pipeline, "replicate": replicate}
        _check_sizes({"world_size": world_size, **dense, "expert": expert, **given}, shard)
        expert_tensor = tensor if expert_tensor is None else expert_tensor
        experts = {"expert_tensor": expert_tensor, "expert": expert, "pipeline": pipeline}
        left = _what_is_left(world_size, dense)
        if shard not in (-1, left):
            raise TopologyError(
                f"{_written({**dense, 'shard': shard})} must be world_size ({world_size}); "
                f"use shard={left}, or -1 for what is left"
            )
        sizes = {"tp": tensor, "cp": context, "pp": pipeline, "dp_replicate": replicate, "dp_shard": left}
        sizes |= {"etp": expert_tensor, "ep": expert, "edp": _what_is_left(world_size, experts)}
        tokens = _parse_order(order, sizes)
        self.world_size = world_size
        self._sizes = sizes
        self._factorisations = [_strides(table, tokens, sizes) for table in (_DENSE, _EXPERT)]
        if pipeline > 1 and len({strides["pp"] for strides in self._factorisations}) > 1:
            raise TopologyError(
                f"the stages of a pipeline must hold the same ranks for dense and expert weights; with order {order!r} "
                f"and sizes {sizes} they do not; put pp last in the order"
            )

    def size(self, axes: str) -> int:
        """How many ranks a group along ``axes`` has."""
        _, names = self._resolve(axes)
        return prod(self._sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` sits on every axis of both factorisations; dp counts over dp_replicate and dp_shard."""
        single = [name for strides in self._factorisations for name in strides]
        return {name: self.position(name, rank) for name in ("dp", *single)}

    def groups(self, axes: str) -> list[list[int]]:
        """The groups of ranks that differ along ``axes`` only: each ascending, together all ranks, by first rank."""
        strides, names = self._resolve(axes)
        others = [name for name in strides if name not in names]
        return [self._span(first, strides, names) for first in self._span(0, strides, others)]

    def group_of(self, axes: str, rank: int) -> list[int]:
        """The group of ``groups(axes)`` that ``rank`` is in, in time that does not grow with the world."""
        strides, names = self._resolve(axes)
        self._check_rank(rank)
        first = rank - sum(self._coordinate(name, strides, rank) * strides[name] for name in names)
        return self._span(first, strides, names)

    def position(self, axes: str, rank: int) -> int:
        """The index of ``rank`` in ``group_of(axes, rank)``."""
        strides, names = self._resolve(axes)
        self._check_rank(rank)
        index = 0
        for name in reversed(names):  # the slowest axis first
            index = index * self._sizes[name] + self._coordinate(name, strides, rank)
        return index

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self._sizes.items() if size > 1)
        return f"RankGrid(world_size={self.world_size}{', ' if sizes else ''}{sizes})"

    def _resolve(self, axes: str) -> tuple[Mapping[str, int], list[str]]:
        """The strides of the factorisation that has ``axes``, and the single axes meant, fastest first."""
        wanted = {name for axis in axes.split("-") for name in (_DENSE["dp"] if axis == "dp" else (axis,))}
        for strides in self._factorisations:
            if wanted <= strides.keys():
                return strides, [name for name in strides if name in wanted]
        raise TopologyError(
            f"axes must be of one factorisation, of {', '.join(_axes(_DENSE))} (or dp, for both its parts) or of "
            f"{', '.join(_axes(_EXPERT))}, joined by hyphens; got {axes!r}"
        )

    def _coordinate(self, name: str, strides: Mapping[str, int], rank: int) -> int:
        return rank // strides[name] % self._sizes[name]

    def _span(self, first: int, strides: Mapping[str, int], names: list[str]) -> list[int]:
        """The ranks reached from ``first`` by steps along ``names``, ascending."""
        steps = [range(0, self._sizes[name] * strides[name], strides[name]) for name in reversed(names)]
        return [first + sum(step) for step in product(*steps)]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"a rank of this world must be in [0, {self.world_size}); got {rank}")


def _check_sizes(sizes: Mapping[str, object], shard: object) -> None:
    """Refuses all wrong sizes at once. A bool is no size, though Python counts it among the integers."""
    wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
    if type(shard) is not int or (shard < 1 and shard != -1):
        wrong["shard"] = shard
    if wrong:
        raise TopologyError(
            f"sizes must be positive integers (shard may be -1, which takes what is left); got "
            f"{', '.join(f'{name}={size!r}' for name, size in wrong.items())}; use 1 for an axis that is not wanted"
        )


def _what_is_left(world_size: int, sizes: Mapping[str, int]) -> int:
    """The size of the last axis of a factorisation, from the others'."""
    taken = prod(sizes.values())
    if world_size % taken:
        raise TopologyError(
            f"{_written(sizes)} must divide world_size ({world_size}); "
            f"use sizes whose product does, or a multiple of {taken} ranks"
        )
    return world_size // taken


def _written(sizes: Mapping[str, int]) -> str:
    """For instance "tensor (2) x pipeline (3) = 6"."""
    return f"{' x '.join(f'{name} ({size})' for name, size in sizes.items())} = {prod(sizes.values())}"


def _parse_order(order: str, sizes: Mapping[str, int]) -> list[str]:
    """The tokens of ``order``, and at the end those left out because all their axes have size 1."""
    tokens = order.split("-")
    if unknown := [token for token in tokens if token not in _DENSE]:
        raise TopologyError(f"order must be of {', '.join(_DENSE)}, joined by hyphens; got {unknown[0]!r} in {order!r}")
    if repeated := [token for token in tokens if tokens.count(token) > 1]:
        raise TopologyError(f"order must name each axis once; got {repeated[0]!r} repeated in {order!r}")
    missing = [token for token in _DENSE if token not in tokens]
    for token in missing:
        for name in _DENSE[token] + _EXPERT[token]:
            if sizes[name] > 1:
                raise TopologyError(
                    f"order must name every axis of size above 1; got {order!r} without {token} ({name} has size "
                    f"{sizes[name]}); add it, as in 'tp-cp-ep-dp-pp'"
                )
    return tokens + missing


def _strides(table: Mapping[str, tuple[str, ...]], tokens: list[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The stride of each axis of one factorisation, fastest first."""
    strides, stride = {}, 1
    for name in (name for token in tokens for name in table[token]):
        strides[name] = stride
        stride *= sizes[name]
    return strides


def _axes(table: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for names in table.values() for name in names]
