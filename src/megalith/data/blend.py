"""Which dataset each sample of a blend comes from, computed from the sample's index.

    c_d(n) = number of the first n samples that dataset d provides,  |c_d(n) - w_d n| < 2,  1/2 with two datasets

w_d is the share of d in the weights. The datasets are the leaves of a Huffman tree. A node passes on round(p m) of its
first m samples to the child that has the share p of its weight, and the rest to the other one. Rounding adds at most
1/2 at each level, and a deviation shrinks by p on the way down; in a Huffman tree the product of two consecutive shares
is at most 1/2, which bounds the sum by 2. Nothing is counted along the way: sample 10^12 is found as fast as sample 0,
and a longer run begins with the samples of a shorter one.

The weights may change from one phase to the next. A dataset then continues where the earlier phases left it, and what
rounding owes to it is made up for: w_d n becomes a sum over phases, also if each has a few samples only.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

__all__ = ["Blend", "BlendPhase", "Weights", "identity_of_first", "is_blend", "weights_to_continue"]

Weights = Mapping[str, Fraction]

_ORDER = "blend"  # the entry of a dataset's identity that names the datasets and weights of each phase
_UNBLENDED = "one dataset"
_UNITS = 1 << 30  # parts of a sample in which is counted what is owed, so that fractions do not grow with the phases


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

    Attributes:
        firsts: the first sample of each phase.
    """

    def __init__(self, phases: Sequence[BlendPhase]) -> None:
        self.firsts = [phase.first_sample for phase in phases]
        assert self.firsts[0] == 0, self.firsts
        self._orders: list[_Order] = []
        self._drawn_before: list[dict[str, int]] = []  # per phase, from each dataset in all earlier phases
        drawn: dict[str, int] = {}
        owed: dict[str, Fraction] = {}
        for phase, end in zip(phases, [*self.firsts[1:], None], strict=True):
            self._drawn_before.append(drawn)
            self._orders.append(_Order(phase.weights, owed))
            if end is not None:
                num_samples, total = end - phase.first_sample, sum(phase.weights.values())
                counts = self._orders[-1].counts(num_samples)
                drawn = _sum(drawn, counts)
                for name, weight in phase.weights.items():
                    due = owed.get(name, Fraction()) + num_samples * weight / total - counts.get(name, 0)
                    owed[name] = Fraction(round(due * _UNITS), _UNITS)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the dataset that provides sample ``index``, and the index of that sample within the dataset."""
        phase = bisect_right(self.firsts, index) - 1
        name, place = self._orders[phase].locate(index - self.firsts[phase])
        return name, self._drawn_before[phase].get(name, 0) + place

    def counts(self, num_samples: int) -> dict[str, int]:
        """Returns how many of the first ``num_samples`` samples each dataset that has been begun provides."""
        phase = bisect_right(self.firsts, max(num_samples - 1, 0)) - 1
        return _sum(self._drawn_before[phase], self._orders[phase].counts(num_samples - self.firsts[phase]))

    def identity(self, identities: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the identity of a blend of datasets with these ``identities``, by name; one tokenizer serves all."""
        tokenizers = (identity.get("tokenizer") for identity in identities.values())
        return {
            "tokenizer": next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None),
            _ORDER: _written(zip(self.firsts, self._orders, strict=True)),
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
    if not is_blend(identity):
        return {_ORDER: _UNBLENDED, **identity}
    phases = _read(identity[_ORDER])
    begun = [(first, weights) for first, weights in phases if first < max(num_samples, 1)]
    names = {name for _, weights in begun for name in weights}
    of_all = {key: value for key, value in identity.items() if "/" not in key and key != _ORDER}
    drawn = {key: value for key, value in identity.items() if key.partition("/")[0] in names and "/" in key}
    if len(names) == 1:
        return {_ORDER: _UNBLENDED, **of_all, **{key.partition("/")[2]: value for key, value in drawn.items()}}
    return {_ORDER: _written((first, _in_words(weights)) for first, weights in begun), **of_all, **drawn}


def is_blend(identity: Mapping[str, Any]) -> bool:
    """Returns whether ``identity`` is that of several datasets."""
    return isinstance(identity.get(_ORDER), str)


def weights_to_continue(
    before: Mapping[str, Any], now: Mapping[str, Any], num_samples: int
) -> list[tuple[int, dict[str, int]]] | None:
    """Returns the phases of a blend that begins as ``before`` and continues as ``now`` after ``num_samples`` samples.

    Args:
        before, now: identities; ``now`` is that of a blend.

    Returns:
        The first sample of each phase, and the weights of all datasets of ``now``; None if ``now`` lacks one that
        ``before`` has read.
    """
    texts = {key.rpartition("/")[0]: value for key, value in now.items() if key.endswith("/text")}
    if is_blend(before):
        begun = [(first, weights) for first, weights in _read(before[_ORDER]) if first < num_samples]
        read = {name: before.get(f"{name}/text") for _, weights in begun for name in weights}
    else:
        alike = [name for name, text in texts.items() if text == before.get("text")]
        begun = [(0, {name: 1}) for name in alike[:1]]
        read = {name: texts[name] for name in alike[:1]}
    planned = _read(now[_ORDER])
    if not begun or any(texts.get(name) != text for name, text in read.items()):
        return None
    _, current = [phase for phase in planned if phase[0] <= num_samples][-1]
    phases = [*begun, (num_samples, current), *(phase for phase in planned if phase[0] > num_samples)]
    return [(first, {name: weights.get(name, 0) for name in texts}) for first, weights in phases]


class _Order:
    """The order in a phase, by index from its beginning; ``owed``: by how much datasets fell short of their shares."""

    def __init__(self, weights: Weights, owed: Weights) -> None:
        self._weights = {name: weight for name, weight in sorted(weights.items()) if weight > 0}
        assert self._weights, "a phase has a weight above 0"
        self._root = _huffman_tree(self._weights, owed)

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
        return _in_words({name: number // divisor for name, number in whole.items()})


@dataclass(frozen=True)
class _Split:
    """A node of the tree, which divides its samples between two children.

    Of its first m, floor((slope m + start) / unit) go to ``left``, as far as this is between 0 and m.
    """

    left: "_Node"
    right: "_Node"
    slope: int
    start: int
    unit: int

    @classmethod
    def of(cls, left: "_Part", right: "_Part") -> "_Split":
        share = left.weight / (left.weight + right.weight)
        # what the left child is owed, without its share of what both are
        start = left.owed - share * (left.owed + right.owed) + Fraction(1, 2)
        unit = math.lcm(share.denominator, start.denominator)
        return cls(left.node, right.node, int(share * unit), int(start * unit), unit)

    def num_left(self, num_samples: int) -> int:
        """How many of the node's first ``num_samples`` samples go to ``left``."""
        return min(max((self.slope * num_samples + self.start) // self.unit, 0), num_samples)


_Node = str | _Split  # a dataset, or a split of what is drawn from several


@dataclass(frozen=True, order=True)
class _Part:
    """A node with its weight; equal ones are joined in the order of their numbers."""

    weight: Fraction
    number: int
    node: _Node = field(compare=False)
    owed: Fraction = field(compare=False)


def _huffman_tree(weights: Weights, owed: Weights) -> _Node:
    """Returns the tree over ``weights``, which are sorted by name."""
    heap = [
        _Part(weight, number, name, owed.get(name, Fraction())) for number, (name, weight) in enumerate(weights.items())
    ]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        lighter, heavier = heapq.heappop(heap), heapq.heappop(heap)
        both = lighter.weight + heavier.weight
        heapq.heappush(heap, _Part(both, number, _Split.of(lighter, heavier), lighter.owed + heavier.owed))
    return heap[0].node


def _written(phases: Iterable[tuple[int, object]]) -> str:
    """Returns the weights of each phase after the index of its first sample: "0: code 1, web 3; 800: code 1, web 1"."""
    return "; ".join(f"{first}: {weights}" for first, weights in phases)


def _in_words(weights: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {weight}" for name, weight in weights.items())


def _read(order: str) -> list[tuple[int, dict[str, int]]]:
    """Reads what ``_written`` returned; leaves out what is damaged."""
    found = []
    for phase in order.split("; "):
        first, _, weights = phase.partition(": ")
        entries = (entry.rpartition(" ") for entry in weights.split(", "))
        read = {name: int(weight) for name, _, weight in entries if name and _is_count(weight)}
        if _is_count(first) and read:
            found.append((int(first), read))
    return found


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 400


def _sum(counts: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + others.get(name, 0) for name in counts | others}
