"""Which dataset each sample of a blend comes from, computed from the sample's index.

    c_d(n) = number of the first n samples that dataset d provides,  |c_d(n) - w_d n| < 2,  1/2 with two datasets

w_d is the share of d in the weights. The datasets are the leaves of a Huffman tree. A node passes on round(p m) of its
first m samples to the child that has the share p of its weight, and the rest to the other one. Rounding adds at most
1/2 at each level, and a deviation shrinks by p on the way down; in a Huffman tree the product of two consecutive shares
is at most 1/2, which bounds the sum by 2. Nothing is counted along the way: sample 10^12 is found as fast as sample 0,
and a longer run begins with the samples of a shorter one.

The weights may change from one phase to the next. A dataset then continues where the earlier phases left it.
"""

import heapq
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

__all__ = ["Blend", "BlendPhase", "Weights", "identity_of_first"]

Weights = Mapping[str, Fraction]

_ORDER = "blend"  # the entry of a dataset's identity that names the datasets and weights of each phase
_UNBLENDED = "one dataset"


@dataclass(frozen=True)
class BlendPhase:
    """From sample ``first_sample`` on, datasets are drawn in proportion to ``weights``; those of weight 0 are not."""

    first_sample: int
    weights: Weights


class Blend:
    """The order in which samples are drawn from several datasets.

    Args:
        phases: the first begins at sample 0, each of the others after the one before it; every phase has a weight
            above 0.
    """

    def __init__(self, phases: Sequence[BlendPhase]) -> None:
        self._firsts = [phase.first_sample for phase in phases]
        assert self._firsts[0] == 0, self._firsts
        self._orders = [_Order(phase.weights) for phase in phases]
        self._drawn_before: list[dict[str, int]] = [{}]  # per phase, from each dataset in all earlier phases
        for number, (first, end) in enumerate(pairwise(self._firsts)):
            drawn = self._orders[number].counts(end - first)
            self._drawn_before.append(_sum(self._drawn_before[-1], drawn))

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the dataset that provides sample ``index``, and the index of that sample within the dataset."""
        phase = bisect_right(self._firsts, index) - 1
        name, place = self._orders[phase].locate(index - self._firsts[phase])
        return name, self._drawn_before[phase].get(name, 0) + place

    def counts(self, num_samples: int) -> dict[str, int]:
        """Returns how many of the first ``num_samples`` samples each dataset that has been begun provides."""
        phase = bisect_right(self._firsts, max(num_samples - 1, 0)) - 1
        return _sum(self._drawn_before[phase], self._orders[phase].counts(num_samples - self._firsts[phase]))

    def identity(self, identities: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the identity of a blend of datasets with these ``identities``, by name; one tokenizer serves all."""
        tokenizers = (identity.get("tokenizer") for identity in identities.values())
        return {
            "tokenizer": next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None),
            _ORDER: _written(zip(self._firsts, self._orders, strict=True)),
            **{
                f"{name}/{key}": value
                for name, identity in identities.items()
                for key, value in identity.items()
                if key != "tokenizer"
            },
        }


def identity_of_first(identity: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns the part of a dataset's ``identity`` that determines its first ``num_samples`` samples.

    It leaves out the phases of a blend that begin later, and datasets that are drawn in these only. What is left of a
    blend may be one dataset; its identity is then the same as without a blend, because the order is the same.
    """
    order = identity.get(_ORDER)
    if not isinstance(order, str):
        return {_ORDER: _UNBLENDED, **identity}
    phases = [(int(first), weights) for first, weights in re.findall(r"(\d{1,19}): ([^;]+)", order)]
    begun = [(first, weights) for first, weights in phases if first < max(num_samples, 1)]
    names = {name for _, weights in begun for name in re.findall(r"([\w-]+) \d+", weights)}
    of_all = {key: value for key, value in identity.items() if "/" not in key and key != _ORDER}
    drawn = {key: value for key, value in identity.items() if key.partition("/")[0] in names and "/" in key}
    if len(names) == 1:
        return {_ORDER: _UNBLENDED, **of_all, **{key.partition("/")[2]: value for key, value in drawn.items()}}
    return {_ORDER: _written(begun), **of_all, **drawn}


class _Order:
    """The order in a phase, by index from its beginning."""

    def __init__(self, weights: Weights) -> None:
        self._weights = {name: weight for name, weight in sorted(weights.items()) if weight > 0}
        assert self._weights, "a phase has a weight above 0"
        self._root = _huffman_tree(self._weights)

    def locate(self, index: int) -> tuple[str, int]:
        node = self._root
        while isinstance(node, _Split):
            before = node.num_left(index)
            if node.num_left(index + 1) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, num_samples: int) -> dict[str, int]:
        return dict(self._counts(num_samples))

    def _counts(self, num_samples: int) -> Iterator[tuple[str, int]]:
        waiting: list[tuple[_Node, int]] = [(self._root, num_samples)]
        while waiting:
            node, number = waiting.pop()
            if isinstance(node, _Split):
                left = node.num_left(number)
                waiting += [(node.left, left), (node.right, number - left)]
            else:
                yield node, number

    def __str__(self) -> str:
        """The weights as the smallest integers in these proportions, sorted by name."""
        scale = math.lcm(*(weight.denominator for weight in self._weights.values()))
        whole = {name: int(weight * scale) for name, weight in self._weights.items()}
        divisor = math.gcd(*whole.values())
        return ", ".join(f"{name} {number // divisor}" for name, number in whole.items())


@dataclass(frozen=True)
class _Split:
    """A node of the tree: the first ``numerator / denominator`` of its samples, evenly spread, go to ``left``."""

    left: "_Node"
    right: "_Node"
    numerator: int
    denominator: int

    def num_left(self, num_samples: int) -> int:
        """How many of the node's first ``num_samples`` samples go to ``left``: the share, rounded."""
        return (2 * self.numerator * num_samples + self.denominator) // (2 * self.denominator)


_Node = str | _Split  # a dataset, or a split of what is drawn from several


def _huffman_tree(weights: Weights) -> _Node:
    """Returns the tree over ``weights``, which are sorted by name so that equal ones are joined in a fixed order."""
    heap: list[tuple[Fraction, int, _Node]] = [(weight, i, name) for i, (name, weight) in enumerate(weights.items())]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        (lighter, _, left), (heavier, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        share = lighter / (lighter + heavier)
        split = _Split(left, right, share.numerator, share.denominator)
        heapq.heappush(heap, (lighter + heavier, number, split))
    return heap[0][2]


def _written(phases: Iterable[tuple[int, object]]) -> str:
    """Returns the weights of each phase after the index of its first sample: "0: code 1, web 3; 800: code 1, web 1"."""
    return "; ".join(f"{first}: {weights}" for first, weights in phases)


def _sum(counts: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + others.get(name, 0) for name in counts | others}
