"""Random numbers for data: a function of (seed, name, index), the same on every machine and numpy version.

The words are numpy's Philox4x64-10 (Salmon et al. 2011), whose raw output is fixed; numpy's distributions, which may
change between its versions (NEP 19), are not used.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws", "uniform_rows"]


class Draws:
    """The random numbers of (``seed``, ``name``, ``index``), one call after the other.

    Another index is another counter under the same key, 2**64 blocks away.
    """

    def __init__(self, seed: int, name: str, index: int) -> None:
        self._words = np.random.Philox(key=_key(seed, name), counter=[0, index, 0, 0])

    def uniform(self, n: int) -> NDArray[np.float64]:
        """float64 [n] in [0, 1)."""
        return _uniform(self._words, n)

    def below(self, n: int) -> int:
        """A whole number in [0, n); n is at most 2**32."""
        return int(self.uniform(1)[0] * n)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self.uniform(1)[0] < probability)

    def order(self, n: int) -> NDArray[np.int64]:
        """A permutation of [0, n), int64 [n]."""
        return np.argsort(self._words.random_raw(n), kind="stable")


def uniform_rows(seed: int, name: str, first: int, num_rows: int) -> NDArray[np.float64]:
    """float64 [num_rows, 4] in [0, 1): rows ``first`` and on of an endless table; a row depends on its number alone."""
    return _uniform(np.random.Philox(key=_key(seed, name), counter=first), 4 * num_rows).reshape(num_rows, 4)


def _uniform(words: np.random.Philox, n: int) -> NDArray[np.float64]:
    # a float64 holds 53 bits
    return (words.random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int, name: str) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "<u8").astype(np.uint64)
