"""The layout of ranks: one world factorized along named axes in two ways, in pure Python.

    dense    tp, cp, dp = dp_replicate x dp_shard, pp       weights applied to every token
    expert   etp, ep, edp = edp_replicate x edp_shard, pp   experts: the same ranks, divided another way

The leftmost axis of the order varies fastest: rank = sum of coordinate * stride, where the stride of an axis is the
product of the sizes to its left. In the order string, tp also stands for etp, and dp for dp_shard (faster),
dp_replicate, edp_shard (faster) and edp_replicate. The dense factorization skips ep, and the expert one skips cp. The
convention is Megatron's. The sizes are those of ``config.layout``.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Unpack

from megalith.config.layout import Degrees, Layout
from megalith.errors import TopologyError

__all__ = ["RankGrid"]

# what each token of the order stands for, fastest axis first
_DENSE = {"tp": ("tp",), "cp": ("cp",), "ep": (), "dp": ("dp_shard", "dp_replicate"), "pp": ("pp",)}
_EXPERT = {"tp": ("etp",), "cp": (), "ep": ("ep",), "dp": ("edp_shard", "edp_replicate"), "pp": ("pp",)}
# joint names for an axis of two parts
_JOINED = {"dp": _DENSE["dp"], "edp": _EXPERT["dp"]}


class RankGrid:
    """The coordinates of every rank of a world, and the groups of ranks along any axes.

    Axes are given alone or joined by hyphens, in any order: "tp", "dp-cp", "etp-ep". All must belong to one
    factorization: tp, cp, dp (or its parts dp_replicate and dp_shard) and pp, or etp, ep, edp (or its parts
    edp_replicate and edp_shard) and pp.

    Args:
        world: number of ranks, or a resolved layout, which needs no degrees.
        degrees: tensor, context, pipeline, replicate, shard and expert are the sizes of tp, cp, pp, dp_replicate,
            dp_shard and ep; ``shard=-1`` takes the rest of the world, as edp always does. ``expert_tensor`` is the size
            of etp; None: that of tp.
        order: the axes, fastest-varying first; axes of size 1 may be left out.

    Raises:
        TopologyError: sizes are not positive integers, or their product is not the world; or ``order`` is invalid.
    """

    def __init__(self, world: int | Layout, *, order: str = "tp-cp-ep-dp-pp", **degrees: Unpack[Degrees]) -> None:
        layout = world if isinstance(world, Layout) else Layout.resolve(world, **degrees)
        sizes = _sizes(layout)
        tokens = _parse_order(order, sizes)
        self.world_size = layout.world_size
        self.layout = layout
        self._sizes = sizes
        self._factorisations = [_strides(table, tokens, sizes) for table in (_DENSE, _EXPERT)]
        if layout.pipeline > 1 and len({strides["pp"] for strides in self._factorisations}) > 1:
            raise TopologyError(
                f"the stages of a pipeline must have the same ranks for dense and expert weights; with order {order!r} "
                f"and sizes {sizes} they do not; put pp last in the order"
            )

    def size(self, axes: str) -> int:
        """Returns the number of ranks in a group along ``axes``."""
        _, names = self._resolve(axes)
        return prod(self._sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the position of ``rank`` on every axis of both factorizations; dp and edp combine their two parts."""
        single = [name for strides in self._factorisations for name in strides]
        return {name: self.position(name, rank) for name in (*_JOINED, *single)}

    def groups(self, axes: str) -> list[list[int]]:
        """Returns the groups of ranks that differ only along ``axes``, by first rank.

        Each is ascending, and every rank is in exactly one.
        """
        strides, names = self._resolve(axes)
        others = [name for name in strides if name not in names]
        return [self._span(first, strides, names) for first in self._span(0, strides, others)]

    def group_of(self, axes: str, rank: int) -> list[int]:
        """Returns the group of ``groups(axes)`` that contains ``rank``, in time independent of the world size."""
        strides, names = self._resolve(axes)
        self._check_rank(rank)
        first = rank - sum(self._coordinate(name, strides, rank) * strides[name] for name in names)
        return self._span(first, strides, names)

    def hierarchical_groups_of(self, axes: str, sizes: Sequence[int], rank: int) -> list[list[int]]:
        """Returns a group containing ``rank`` for each of ``sizes``, a subset of its group along ``axes``.

        Members are numbered in mixed radix with those sizes, digit 0 fastest; the group of level k consists of those
        whose numbers differ only in digit k. Raises TopologyError unless the product of the sizes is the size of
        ``axes``.
        """
        if any(type(size) is not int or size < 1 for size in sizes) or prod(sizes) != self.size(axes):
            raise TopologyError(
                f"hierarchical sizes must be positive integers whose product is {self.size(axes)}, the size of {axes}; "
                f"got {list(sizes)}"
            )
        members, index = self.group_of(axes, rank), self.position(axes, rank)
        levels, stride = [], 1
        for size in sizes:
            first = index - index // stride % size * stride  # its digit set to 0
            levels.append([members[first + digit * stride] for digit in range(size)])
            stride *= size
        return levels

    def single_axes(self, axes: str) -> frozenset[str]:
        """Returns the individual axes of ``axes``, independent of their order and with joint names split up."""
        return frozenset(self._resolve(axes)[1])

    def position(self, axes: str, rank: int) -> int:
        """Returns the index of ``rank`` in ``group_of(axes, rank)``."""
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
        """Returns the strides of the factorization that contains ``axes``, and the individual axes, fastest first."""
        wanted = {name for axis in axes.split("-") for name in _JOINED.get(axis, (axis,))}
        for strides in self._factorisations:
            if wanted <= strides.keys():
                return strides, [name for name in strides if name in wanted]
        raise TopologyError(
            f"axes must be hyphen-separated names from one factorization: {', '.join(_axes(_DENSE))} (or dp), or "
            f"{', '.join(_axes(_EXPERT))} (or edp); got {axes!r}"
        )

    def _coordinate(self, name: str, strides: Mapping[str, int], rank: int) -> int:
        return rank // strides[name] % self._sizes[name]

    def _span(self, first: int, strides: Mapping[str, int], names: list[str]) -> list[int]:
        """Returns the ranks reached from ``first`` by steps along ``names``, ascending."""
        steps = [range(0, self._sizes[name] * strides[name], strides[name]) for name in reversed(names)]
        return [first + sum(step) for step in product(*steps)]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank must be in [0, {self.world_size}); got {rank}")


def _sizes(layout: Layout) -> dict[str, int]:
    """Returns the size of every individual axis."""
    return {
        "tp": layout.tensor,
        "cp": layout.context,
        "pp": layout.pipeline,
        "dp_replicate": layout.replicate,
        "dp_shard": layout.shard,
        "etp": layout.expert_tensor,
        "ep": layout.expert,
        "edp_replicate": layout.edp_replicate,
        "edp_shard": layout.edp_shard,
    }


def _parse_order(order: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns the tokens of ``order``, followed by those left out because all their axes have size 1."""
    tokens = order.split("-")
    if unknown := [token for token in tokens if token not in _DENSE]:
        raise TopologyError(
            f"order must consist of {', '.join(_DENSE)}, joined by hyphens; got {unknown[0]!r} in {order!r}"
        )
    if repeated := [token for token in tokens if tokens.count(token) > 1]:
        raise TopologyError(f"order must name each axis once; got {repeated[0]!r} repeated in {order!r}")
    missing = [token for token in _DENSE if token not in tokens]
    for token in missing:
        for name in _DENSE[token] + _EXPERT[token]:
            if sizes[name] > 1:
                raise TopologyError(
                    f"order must name every axis larger than 1; got {order!r} without {token} ({name} has size "
                    f"{sizes[name]}); add it, as in 'tp-cp-ep-dp-pp'"
                )
    return tokens + missing


def _strides(table: Mapping[str, tuple[str, ...]], tokens: list[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the stride of each axis of one factorization, fastest first."""
    strides, stride = {}, 1
    for name in (name for token in tokens for name in table[token]):
        strides[name] = stride
        stride *= sizes[name]
    return strides


def _axes(table: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for names in table.values() for name in names]
