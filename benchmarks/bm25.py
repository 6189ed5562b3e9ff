"""BM25, the retrieval baseline without a model: ranks passages by the words that they share with a query.

    score(q, p) = sum over words w of q:  idf(w) f (k + 1) / (f + k (1 - b + b |p| / mean length))
    idf(w)      = log(1 + (N - n + 1/2) / (n + 1/2))

for f occurrences of w in a passage of |p| words, and n of N passages with w. Robertson and Zaragoza 2009, "The
Probabilistic Relevance Framework: BM25 and Beyond", with the constants and the idf of Lucene, k = 1.2 and b = 0.75.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["places_by_bm25", "words"]

_K, _B = 1.2, 0.75
# the parts of snake_case and CamelCase names, and numbers
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words(text: str) -> list[str]:
    """Splits text or code into words, in lower case; names are split into their parts."""
    return [word.lower() for word in _WORD.findall(text)]


def places_by_bm25(queries: Sequence[str], passages: Sequence[str]) -> NDArray[np.int64]:
    """Returns the place of passage i among all by its score for query i, int64 [N]; of equal scores it is the last."""
    counts = [Counter(words(passage)) for passage in passages]
    lengths = np.array([count.total() for count in counts])
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> passages that have it, and how often
    for number, count in enumerate(counts):
        for word, times in count.items():
            found[word].append((number, times))
    places = np.empty(len(queries), np.int64)
    for number, query in enumerate(queries):
        scores = np.zeros(len(passages))
        for word in set(words(query)) & found.keys():
            having, times = np.array(found[word]).T
            idf = math.log(1 + (len(passages) - len(having) + 0.5) / (len(having) + 0.5))
            norm = _K * (1 - _B + _B * lengths[having] / lengths.mean())
            scores[having] += idf * times * (_K + 1) / (times + norm)
        places[number] = (scores >= scores[number]).sum()
    return places
