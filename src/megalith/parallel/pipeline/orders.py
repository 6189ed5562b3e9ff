"""The order of one rank's actions in each schedule: p ranks, m micro-batches, v chunks per rank, groups of g.

F, I and W stand for forward, backward_input and backward_weight; f0 is a forward in chunk 0.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megalith.parallel.pipeline.plan import Action, Kind

__all__ = [
    "Sizes",
    "forward_down_and_up",
    "forward_in_groups",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zb_v",
    "zero_bubble",
]

_SPLIT: tuple[Kind, Kind, Kind] = ("forward", "backward_input", "backward_weight")


class Sizes(NamedTuple):
    """Ranks, micro-batches, chunks per rank, and micro-batches in a group."""

    p: int
    m: int
    v: int
    g: int


def gpipe(rank: int, sizes: Sizes) -> list[Action]:
    """All micro-batches forward, then all of them backward (arXiv:1811.06965)."""
    return _in_groups("forward", sizes.m, [0]) + _in_groups("backward", sizes.m, [0])


def one_f_one_b(rank: int, sizes: Sizes) -> list[Action]:
    """Forwards until the first backward can start, then one forward, one backward (arXiv:2104.04473, section 2.2.1)."""
    forwards, backwards = _in_groups("forward", sizes.m, [0]), _in_groups("backward", sizes.m, [0])
    return _alternate(forwards, backwards, sizes.p - rank - 1)


def interleaved(rank: int, sizes: Sizes) -> list[Action]:
    """1F1B over several chunks: each group of g micro-batches passes chunk by chunk (arXiv:2104.04473, section 2.2.2).

    The warm-up is Megatron-Core's: two forwards for each following rank, and g for each following chunk.
    """
    p, m, v, g = sizes
    forwards = _in_groups("forward", m, range(0, m, g), range(v))
    backwards = _in_groups("backward", m, range(0, m, g), range(v)[::-1])
    return _alternate(forwards, backwards, 2 * (p - rank - 1) + (v - 1) * g)


def zero_bubble(rank: int, sizes: Sizes) -> list[Action]:
    """ZB-H1: 1F1B with I in place of the backward, and W delayed by ``rank`` micro-batches (arXiv:2401.10241).

    Each rank has one warm-up forward less than the previous rank and delays one W more, so that every rank keeps at
    most p live activations. The delayed W fill the bubble at the end.
    """
    p, m, _, _ = sizes
    forwards, backwards = _in_groups("forward", m, [0]), _in_groups("backward_input", m, [0])
    actions: list[Action] = []
    for action in _alternate(forwards, backwards, p - rank - 1):
        actions.append(action)
        if action.kind == "backward_input" and action.micro_batch >= rank:
            actions.append(Action("backward_weight", action.micro_batch - rank))
    return actions + [Action("backward_weight", k) for k in range(max(m - rank, 0), m)]


def zb_v(rank: int, sizes: Sizes) -> list[Action]:
    """ZB-V: two chunks per rank in a V; if F, I and W take the same time, no rank waits once it has started.

    The order is that of arXiv:2401.10241, section 6 (V-ZB in arXiv:2405.15362). It needs 2 p - 1 or more micro-batches;
    with fewer, the actions of the missing ones are left out. No other action depends on them.
    """
    p, m, _, _ = sizes
    num_filling = max(m, 2 * p - 1)
    f0, i0, w0 = ((kind, 0) for kind in _SPLIT)
    f1, i1, w1 = ((kind, 1) for kind in _SPLIT)
    steps: list[tuple[Kind, int]] = [
        # warm-up: forward until the first micro-batch is back up the V, then the first backwards of chunk 1
        *[f0] * (2 * (p - rank) - 1),
        *[f1, f0] * rank,
        *[f1, i1, w1] * (p - rank),
        # steady
        *[f0, i0, w0, f1, i1, w1] * (num_filling - 2 * p + rank + 1),
        *[i0, w0, f1, i1, w1] * (p - rank - 1),
        # cool-down: W fills the time until the next I can start
        *[i0, i1] * rank,
        *[i0, w0] * (p - rank),
        *[w1] * rank,
        *[w0] * rank,
    ]
    return [action for action in _numbered(steps) if action.micro_batch < m]


def forward_in_groups(rank: int, sizes: Sizes) -> list[Action]:
    """Forwards of looped chunks in groups of p; the last group includes the remainder, which would stall if alone."""
    p, m, v, _ = sizes
    return _in_groups("forward", m, range(0, max(m - p, 0) + 1, p), range(v))


def forward_down_and_up(rank: int, sizes: Sizes) -> list[Action]:
    """Forwards of a V: chunk 0 until the first micro-batch is back up, then both chunks alternately."""
    down, up = (_in_groups("forward", sizes.m, [0], [chunk]) for chunk in (0, 1))
    return _alternate(down, up, 2 * (sizes.p - rank - 1))


def _in_groups(kind: Kind, m: int, firsts: Sequence[int], chunks: Iterable[int] = (0,)) -> list[Action]:
    """Takes every micro-batch through ``chunks``, group by group; ``firsts`` are the groups' first micro-batches."""
    groups = [range(first, end) for first, end in zip(firsts, [*firsts[1:], m], strict=True)]
    return [Action(kind, k, chunk) for group in groups for chunk in chunks for k in group]


def _alternate(first: list[Action], second: list[Action], num_warm_up: int) -> list[Action]:
    """Returns up to ``num_warm_up`` of ``first``, then both lists alternately, then the rest of ``second``."""
    warm_up, rest = first[:num_warm_up], first[num_warm_up:]
    pairs = zip(rest, second, strict=False)
    return warm_up + [action for pair in pairs for action in pair] + second[len(rest) :]


def _numbered(steps: Iterable[tuple[Kind, int]]) -> list[Action]:
    """Assigns micro-batch n to the n-th step of each kind and chunk."""
    actions, counts = [], Counter[tuple[Kind, int]]()
    for kind, chunk in steps:
        actions.append(Action(kind, counts[kind, chunk], chunk))
        counts[kind, chunk] += 1
    return actions
