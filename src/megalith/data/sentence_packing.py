"""Packs consecutive sentences of a document greedily into samples, up to a target length.

A sample takes sentences until their tokens reach its target length. A remainder of the document with too few sentences
for a sample joins the previous one; in Megatron, so does a single last sentence where one would be enough. The target
length is the full length or, with the probability of short sequences, uniform from 2 to the full length, as in the
masked-language-model samples of BERT (Devlin et al. 2018, arXiv:1810.04805, appendix A.2) and Megatron. It depends on
(seed, first sentence), so the samples are the same in every epoch, however many are requested.

For every sentence at once, a binary search finds the first sentence of the sample after the one that begins there. The
samples are then the sentences reachable from the first one of each document, found by pointer doubling.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.numerics.draws import uniform_rows

__all__ = ["PackedSamples", "pack_sentences"]

_BLOCK = 1 << 22  # sentences processed at once

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class PackedSamples:
    """N samples in text order, arrays [N]: sample n is the sentences ``firsts[n]`` to ``ends[n]`` (exclusive).

    ``targets``: maximum number of tokens of each sample.
    """

    firsts: Numbers
    ends: Numbers
    targets: Numbers

    def __len__(self) -> int:
        return len(self.firsts)


def pack_sentences(
    lengths: Numbers,
    document_starts: Numbers,
    *,
    room: int,
    min_sentences: int,
    short_sequence_probability: float,
    seed: int,
) -> PackedSamples:
    """Packs sentences of ``lengths`` [S] tokens into samples.

    Documents with fewer than ``min_sentences`` sentences, or with one of more than ``room`` tokens, yield no samples.

    Args:
        document_starts: [D + 1]; document d is sentences ``document_starts[d]`` to ``[d + 1]``.
        room: the full length in tokens, at least 2.
    """
    found: list[PackedSamples] = []
    first = 0  # document
    while first < len(document_starts) - 1:
        beyond = np.searchsorted(document_starts, document_starts[first] + _BLOCK, side="right") - 1
        last = max(first + 1, int(beyond))  # at least one document, however long
        origin = int(document_starts[first])
        block = lengths[origin : int(document_starts[last])].astype(np.int64)
        targets = _targets(seed, origin, len(block), room, short_sequence_probability)
        starts = document_starts[first : last + 1] - origin
        firsts, ends = _pack(block, starts, targets, room, min_sentences)
        found.append(PackedSamples(firsts + origin, ends + origin, targets[firsts]))
        first = last
    columns = ([getattr(each, name) for each in found] for name in ("firsts", "ends", "targets"))
    return PackedSamples(*(np.concatenate([np.zeros(0, np.int64), *column]) for column in columns))


def _targets(seed: int, first: int, number: int, room: int, short_probability: float) -> Numbers:
    """The target lengths of samples that would begin at each of ``number`` sentences from ``first`` on."""
    drawn = uniform_rows(seed, "target lengths", first, number)
    short = 2 + (drawn[:, 1] * (room - 1)).astype(np.int64)
    return np.where(drawn[:, 0] < short_probability, short, room)


def _pack(
    lengths: Numbers, starts: Numbers, targets: Numbers, room: int, min_sentences: int
) -> tuple[Numbers, Numbers]:
    """First and last sentence (exclusive) of each sample of the documents that begin at ``starts``."""
    N = len(lengths)
    ends = np.cumsum(lengths)
    counts = np.diff(starts)
    document_ends = np.repeat(starts[1:], counts)
    # the next sample begins after the sentence that reaches the target
    following = np.searchsorted(ends, ends - lengths + targets, side="left") + 1
    following = np.maximum(following, np.arange(N) + min_sentences)
    following = np.where(document_ends - following < min_sentences, document_ends, following)
    too_long = np.concatenate(([0], np.cumsum(lengths > room)))
    is_used = (counts >= min_sentences) & (too_long[starts[1:]] == too_long[starts[:-1]])
    reached = np.zeros(N + 1, np.bool_)  # index N: past the last sample of a document
    reached[starts[:-1][is_used]] = True
    jump = np.append(np.where(following < document_ends, following, N), N)
    while (jump < N).any():
        reached[jump[reached]] = True
        jump = jump[jump]
    firsts = np.flatnonzero(reached[:N])
    return firsts, following[firsts]
