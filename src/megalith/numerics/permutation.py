"""A shuffle without storage: a keyed bijection of [0, n), evaluated at any point.

An alternating Feistel network over the smallest power of two that holds n, and at least 2^6: each round XORs one half
of the bits with a keyed hash of the other half, which can be undone, so the network is a bijection whatever the hash is
(Luby and Rackoff 1988). A result outside [0, n) is fed back in until it falls inside (cycle walking; Black and Rogaway
2002): under two passes on average, more only below n = 32.

The data order of a training run follows from these numbers: changing any of them changes the order of every run.
"""

import hashlib
from typing import overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeyedPermutation"]

_NUM_ROUNDS = 8  # one 64-byte digest gives eight keys of 64 bits
# a smaller network is biased: over seeds, the orders of 5 elements have chi-square 5.1 per degree of freedom with
# 3 bits, and 0.8 with 6
_LEAST_BITS = 6


class KeyedPermutation:
    """The permutation of [0, n) for (seed, name); another seed or name gives an unrelated one.

    Args:
        n: 1 to 2**62.
        seed: any integer.
        name: what is shuffled, so that one seed serves many shuffles.

    Raises:
        ValueError: n is out of range.
    """

    def __init__(self, n: int, seed: int, name: str) -> None:
        if not 1 <= n <= 2**62:
            raise ValueError(f"a permutation needs 1 to 2**62 elements; got {n}")
        self.n = n
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        num_bits = max(_LEAST_BITS, (n - 1).bit_length())
        self._low_bits = np.uint64(num_bits // 2)
        self._low_mask = np.uint64((1 << num_bits // 2) - 1)
        self._high_mask = np.uint64((1 << num_bits - num_bits // 2) - 1)

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __call__(self, index: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Returns the images of ``index``, of the same shape. Raises IndexError for an index outside [0, n)."""
        given = np.asarray(index, dtype=np.int64)
        if given.size and not (given.min() >= 0 and given.max() < self.n):
            raise IndexError(f"indices must be in [0, {self.n}); got {given.min()} to {given.max()}")
        image = self._network(given.ravel().astype(np.uint64))
        outside = np.flatnonzero(image >= self.n)
        while outside.size:
            image[outside] = self._network(image[outside])
            outside = outside[image[outside] >= self.n]
        return int(image[0]) if isinstance(index, int) else image.astype(np.int64).reshape(given.shape)

    def _network(self, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = index & self._low_mask, index >> self._low_bits
        for turn, key in enumerate(self._keys):
            if turn % 2:
                high = high ^ (_hash(low, key) & self._high_mask)
            else:
                low = low ^ (_hash(high, key) & self._low_mask)
        return (high << self._low_bits) | low


def _hash(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), applied to x + key; products wrap at 2**64."""
    x = x + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
