"""Finds the tokens that end a turn of the assistant, such as ``<|im_end|>``, in the conversations of a dataset."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from megalith.data.conversations import learned_sequences
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.tokenizer import Tokenizer

__all__ = ["turn_ends"]

_MOST_BLANKS = 8  # tokens of white space after the end of a turn; ChatML's template writes one, a line break
_LEAST_SHARE = 0.1  # of the turns; some models end those that call a tool with a token of their own


def turn_ends(datasets: Iterable[IndexedDataset], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that end at least a tenth of what is learned in ``datasets``, the most frequent first.

    What a turn has after such a token is only white space. The files may still be without a sidecar.
    """
    is_blank = functools.cache(lambda id: id not in tokenizer.special_ids and not tokenizer.decode([id]).strip())
    special = np.array(sorted(tokenizer.special_ids), np.int64)
    counts: Counter[int] = Counter()
    num_turns = 0
    for dataset in datasets:
        is_turn = learned_sequences(dataset) & (dataset.sequence_lengths > 0)
        starts = dataset.sequence_starts()
        counts.update(_ends(dataset, starts[:-1][is_turn], starts[1:][is_turn], special, is_blank).tolist())
        num_turns += int(is_turn.sum())
    return tuple(id for id, count in counts.most_common() if count >= _LEAST_SHARE * num_turns)


def _ends(
    dataset: IndexedDataset,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    special: NDArray[np.int64],
    is_blank: Callable[[int], bool],
) -> NDArray[np.int64]:
    """The last special token of each span of tokens [start, stop) that has one, with only white space after it."""
    tokens = np.asarray(dataset.tokens)  # a view: the files are on a local disk
    found = [np.empty(0, np.int64)]
    for _ in range(_MOST_BLANKS + 1):
        stops, starts = stops[stops > starts], starts[stops > starts]
        ids = tokens[stops - 1].astype(np.int64)
        found.append(ids[np.isin(ids, special)])
        goes_on = np.isin(ids, [id for id in np.unique(ids).tolist() if is_blank(id)])
        starts, stops = starts[goes_on], stops[goes_on] - 1
    return np.concatenate(found)
