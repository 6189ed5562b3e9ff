"""Pipeline schedules by name: the plans of all ranks, and the sizes that each schedule supports.

    name         chunks   bubble                        live activations of rank r, at most
    gpipe        1        (p-1) / m                     m
    1f1b         1        (p-1) / m                     min(p-r, m)
    interleaved  v >= 2   (p-1) / (v m)                 min(2 (p-r-1) + (v-1) g + 1, v m)
    zero_bubble  1        (p-1) (F+I-W) / (m (F+I+W))   min(p, m)
    zb_v         2        (p-1) / (6 m)                 min(2 p, 2 m)

p ranks, m micro-batches, v chunks per rank, g micro-batches per group; F, I, W: the times of a forward and of the
backwards of inputs and weights. The bubble is idle time over busy time. Its formula holds for zero_bubble if m >= p and
W <= min(F, I), and for zb_v if F = I = W and 2 m >= 3 p - 1. A live activation is a pair of a micro-batch and a chunk
(1/v of the rank's layers) whose forward is done and whose backward is not. Between the two actions of a split backward
only the operands of matrix products are kept (``split_product``).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import inf
from typing import Literal, NamedTuple

from megalith.errors import ConfigError
from megalith.parallel.pipeline import orders
from megalith.parallel.pipeline.orders import Sizes
from megalith.parallel.pipeline.placement import Placement, check_sizes
from megalith.parallel.pipeline.plan import Action, Plan, Schedule

__all__ = ["SCHEDULES", "build_schedule", "forward_only", "placement_of", "splits_backward"]


class _Definition(NamedTuple):
    """The order of a rank's actions, limits on its chunks, the shape of the placement, whether backwards are split."""

    order: Callable[[int, Sizes], list[Action]]
    least: int = 1
    most: float = 1
    shape: Literal["looped", "v"] = "looped"
    splits: bool = False


_DEFINITIONS = {
    "gpipe": _Definition(orders.gpipe),
    "1f1b": _Definition(orders.one_f_one_b),
    "interleaved": _Definition(orders.interleaved, least=2, most=inf),
    "zero_bubble": _Definition(orders.zero_bubble, splits=True),
    "zb_v": _Definition(orders.zb_v, least=2, most=2, shape="v", splits=True),
}
SCHEDULES = tuple(_DEFINITIONS)


def build_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, group_size: int | None = None
) -> Schedule:
    """Builds the schedule ``name`` of a training step.

    Args:
        name: one of ``SCHEDULES``.
        num_chunks: chunks per rank.
        group_size: for "interleaved" only: how many micro-batches a rank runs through one chunk before it continues
            with its next chunk; None means ``num_ranks``.

    Raises:
        ConfigError: an unknown name, or sizes that the schedule does not support.
    """
    definition = _definition(name)
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    _check_chunks(name, num_chunks)
    if name == "interleaved":
        group_size = num_ranks if group_size is None else group_size
        _check_groups(num_ranks, num_microbatches, group_size)
    elif group_size is not None:
        raise ConfigError(
            f"group_size applies only to interleaved; got {group_size} for {name}, which has no groups; leave it out"
        )
    sizes = Sizes(num_ranks, num_microbatches, num_chunks, group_size or num_microbatches)
    return _schedule(placement_of(name, num_ranks, num_chunks), sizes, definition.order)


def placement_of(name: str, num_ranks: int, num_chunks: int) -> Placement:
    """Returns the placement of stages for the schedule ``name``. Raises ConfigError for an unknown name."""
    return Placement(num_ranks, num_chunks, _definition(name).shape)


def splits_backward(name: str) -> bool:
    """Whether the schedule ``name`` splits backwards into two actions. Raises ConfigError for an unknown name."""
    return _definition(name).splits


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Builds the schedule of an evaluation step: every micro-batch forward through every stage.

    Raises:
        ConfigError: a number of micro-batches that is not a positive integer.
    """
    check_sizes(num_microbatches=num_microbatches)
    order = orders.forward_down_and_up if placement.shape == "v" else orders.forward_in_groups
    sizes = Sizes(placement.num_ranks, num_microbatches, placement.num_chunks, placement.num_ranks)
    return _schedule(placement, sizes, order)


def _definition(name: str) -> _Definition:
    if name not in _DEFINITIONS:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}; got {name!r}")
    return _DEFINITIONS[name]


def _schedule(placement: Placement, sizes: Sizes, order: Callable[[int, Sizes], list[Action]]) -> Schedule:
    plans = tuple(_reduce_in_the_last(order(rank, sizes)) for rank in range(placement.num_ranks))
    return Schedule(placement, sizes.m, plans)


def _reduce_in_the_last(actions: list[Action]) -> Plan:
    """Returns ``actions`` as a plan in which the last action that adds to a chunk's gradients also reduces them."""
    last = {action.chunk: index for index, action in enumerate(actions) if action.adds_to_gradients}
    return tuple(
        replace(action, reduces=True) if last.get(action.chunk) == index else action
        for index, action in enumerate(actions)
    )


def _check_chunks(name: str, num_chunks: int) -> None:
    fitting = [other for other, definition in _DEFINITIONS.items() if definition.least <= num_chunks <= definition.most]
    if name not in fitting:
        least, most = _DEFINITIONS[name].least, _DEFINITIONS[name].most
        raise ConfigError(
            f"{name} needs num_chunks={least}{'' if least == most else ' or more'}; got {num_chunks}, which works "
            f"with {', '.join(fitting)}"
        )


def _check_groups(p: int, m: int, g: int) -> None:
    """Megatron-Core's rule: with a smaller group, ranks would wait for one another, or deadlock."""
    check_sizes(group_size=g)
    if _fits(p, m, g):
        return
    fitting = [size for size in range(p, m + 1) if _fits(p, m, size)]
    ways = [f"group_size={fitting[0]}"] if fitting else []  # the smallest keeps the fewest activations
    if g >= p:
        ways.append(f"num_microbatches={next(number for number in count(m) if _fits(p, number, g))}")
    elif not fitting:
        ways.append(f"num_microbatches={p} with group_size={p}")
    raise ConfigError(
        f"interleaved needs group_size from num_ranks ({p}) to num_microbatches ({m}), with at least num_ranks "
        f"micro-batches in the last group; got group_size={g}{f', which leaves {m % g}' if p <= g <= m else ''}; use "
        f"{' or '.join(ways)}"
    )


def _fits(p: int, m: int, g: int) -> bool:
    return p <= g <= m and (m % g == 0 or m % g >= p)
