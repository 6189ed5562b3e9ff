"""Philox4x32-10 in plain torch: four random 32-bit words for each 128-bit counter, under a 64-bit key.

The words depend only on counter and key, so any rank computes its own part of any random tensor and stores nothing.
They are bitwise equal on every device. Words are int64 tensors holding uint32: torch has no unsigned multiply, and the
low 64 bits of a product are the same for both.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; known answers from their Random123 library.
"""

from hashlib import blake2b

import torch
from torch import Tensor

__all__ = ["counters_per_chunk", "key_of", "low_and_high", "philox4x32"]

_ROUNDS = 10
_MOST_THREADS = 16  # that share a chunk, whose temporaries take 8 bytes a counter each
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # fractional parts of the golden ratio and of sqrt(3)


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int | Tensor, k1: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four random words for each counter (``c0``, ``c1``, ``c2``, ``c3``) under the key (``k0``, ``k1``).

    Counter words are int64 tensors holding uint32, broadcast against each other; key words are in [0, 2^32), ints or
    int64 tensors. The results are int64 tensors holding uint32, uniform and independent, of the broadcast shape.
    """
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(product1) ^ c1 ^ k0, _high(product0) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def low_and_high(index: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two counter words of a 64-bit ``index``, int64 of any shape."""
    return index & _WORD, _high(index)


def key_of(seed: int, name: str) -> tuple[int, int]:
    """Returns the Philox key of the random tensor ``name``: two words of a BLAKE2b hash of both."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def counters_per_chunk(device: torch.device) -> int:
    """Returns how many counters to pass to ``philox4x32`` at a time, so that its temporaries stay small.

    On a CPU each thread's part should stay in its caches (measured on one thread: 16k is faster than 4k or 64k, on two
    64k is faster than 16k), and torch gives a thread no less than 32k; a GPU needs few launches.
    """
    if device.type != "cpu":
        return 2**22
    threads = torch.get_num_threads()
    return 2**14 if threads == 1 else 2**15 * min(threads, _MOST_THREADS)


def _high(product: Tensor) -> Tensor:
    """Returns the upper word of a 64-bit product; the mask removes the sign bits of the arithmetic shift."""
    return (product >> 32) & _WORD
