"""Random numbers for data: a function of (seed, name, index), the same on every machine and numpy version.

They are the raw output of numpy's Philox4x64-10 (Salmon et al. 2011), which is guaranteed to be stable; numpy's
distributions are not used because they may change between versions (NEP 19).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws", "uniform_rows"]


class Draws:
    """A stream of random numbers for (``seed``, ``name``, ``index``), consumed call by call.

    Each index uses the same key with a counter 2**64 blocks away from that of the next.
    """

    def __init__(self, seed: int, name: str, index: int) -> None:
        self._words = np.random.Philox(key=_key(seed, name), counter=[0, index, 0, 0])

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Returns float64 [n] in [0, 1)."""
        return _uniform(self._words, n)

    def below(self, n: int) -> int:
        """Returns an integer in [0, n); n is at most 2**32."""
        return int(self.uniform(1)[0] * n)

    def chance(self, probability: float) -> bool:
        """Returns True with this probability."""
        return bool(self.uniform(1)[0] < probability)

    def order(self, n: int) -> NDArray[np.int64]:
        """Returns a permutation of [0, n), int64 [n]."""
        return np.argsort(self._words.random_raw(n), kind="stable")


def uniform_rows(seed: int, name: str, first: int, num_rows: int) -> NDArray[np.float64]:
    """Returns float64 [num_rows, 4] in [0, 1): rows from ``first`` on of an infinite table, each set by its index."""
    return _uniform(np.random.Philox(key=_key(seed, name), counter=first), 4 * num_rows).reshape(num_rows, 4)


def _uniform(words: np.random.Philox, n: int) -> NDArray[np.float64]:
    # a float64 holds 53 bits
    return (words.random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int, name: str) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "<u8").astype(np.uint64)
