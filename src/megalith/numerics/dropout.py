"""Dropout whose mask is a function of an element's global position, recomputed rather than stored.

Any layout drops the same elements, as does recomputation, and nothing of the mask is saved for backward. Each element
is decided by one Philox word under the key BLAKE2b(seed, step), and kept if word >= p * 2^32. Each dropout site has its
own seed: the run's seed XOR a hash of the site's canonical name (``model.layers.3.self_attn_dropout``). The four
counter words are

    c0, c1  global token id, low and high word
    c2      feature // 4; the feature uses word feature % 4
    c3      site + 2^16 * head: which dropout of which layer, and which attention head

A feature is the hidden index for activations, and the key position for attention probabilities, whose token is that of
the query. Activations have no heads and use head 0, so a name and site must not be shared between the two kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.numerics.philox import counters_per_chunk, key_of, low_and_high, philox4x32
from megalith.torch_compat.tensors import is_capturing

__all__ = [
    "Dropout",
    "DropoutKey",
    "attention_dropout",
    "attention_keep_mask",
    "dropout",
    "keep_mask",
    "keep_mask_of",
    "name_number",
    "philox_key",
    "threshold",
    "uniform",
]

_SITES = 2**16


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """Everything that decides a dropout mask, except the feature: seed, step, site, and global token ids.

    Token ids are int64, shaped like the activations without their last dimension: for example sample * S + position.
    """

    seed: int
    step: int
    tokens: Tensor
    site: int = 0

    def __post_init__(self) -> None:
        if self.tokens.dtype != torch.int64:
            raise ShapeError(f"tokens must be int64 global token ids; got {self.tokens.dtype}; pass tokens.long()")
        if not 0 <= self.site < _SITES:
            raise ConfigError(f"site must be in [0, {_SITES}), the low half of a counter word; got {self.site}")

    def at(self, site: int) -> "DropoutKey":
        """Returns the key for another site under the same name: no two dropouts of a step may share both."""
        return replace(self, site=site)

    def named(self, number: int) -> "DropoutKey":
        """Returns the key of one of a model's dropouts, whose ``number`` is ``name_number`` of its canonical name."""
        return replace(self, seed=self.seed ^ number)


@dataclass(frozen=True, eq=False)
class Dropout:
    """Zeroes a fraction ``p`` of the elements, chosen by ``key``. Where a Dropout is optional, None means no dropout.

    Without a key, one is drawn from torch's generator: reproducible with torch.manual_seed, but dependent on the layout
    of ranks. Raises ConfigError for a ``p`` outside [0, 1).
    """

    p: float
    key: DropoutKey | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.p < 1.0:
            raise ConfigError(f"p must be in [0, 1), the fraction of elements to drop; got {self.p}")


def name_number(name: str) -> int:
    """Returns a 63-bit hash of the canonical name of a dropout site.

    A hash rather than a counter: a pipeline stage or second stack that counted from 0 would reuse the masks of another.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def keep_mask(key: DropoutKey, p: float, num_features: int, feature_offset: int = 0) -> Tensor:
    """Returns which elements to keep: bool [*tokens.shape, num_features], each True with probability 1 - ``p``.

    ``feature_offset`` is the global index of this rank's first feature. Raises ConfigError for a ``p`` outside [0, 1].
    """
    sites = torch.full_like(key.tokens, key.site)
    return keep_mask_of(philox_key(key.seed, key.step), key.tokens, sites, p, num_features, feature_offset)


def attention_keep_mask(
    key: DropoutKey, p: float, num_heads: int, num_keys: int, head_offset: int = 0, key_offset: int = 0
) -> Tensor:
    """Returns which attention probabilities to keep: bool [B, num_heads, Q, num_keys].

    ``key.tokens`` is [B, Q], the queries. ``head_offset`` is the global index of this rank's first head, ``key_offset``
    the first key's position in its row. Raises ConfigError for a ``p`` outside [0, 1], or heads outside [0, 2^16).
    """
    if not 0 <= head_offset <= head_offset + num_heads <= _SITES:
        raise ConfigError(f"heads must be in [0, {_SITES}); got {num_heads} heads starting at {head_offset}")
    B, Q = key.tokens.shape
    heads = torch.arange(head_offset, head_offset + num_heads, device=key.tokens.device)
    sites = (key.site + _SITES * heads)[:, None].expand(B, num_heads, Q)
    tokens = key.tokens[:, None].expand(B, num_heads, Q)
    return keep_mask_of(philox_key(key.seed, key.step), tokens, sites, p, num_keys, key_offset)


def keep_mask_of(
    words: tuple[int | Tensor, int | Tensor],
    tokens: Tensor,
    sites: Tensor,
    p: float,
    num_features: int,
    feature_offset: int = 0,
) -> Tensor:
    """``keep_mask`` for a Philox key given as two ``words``; ``tokens`` and ``sites`` are int64 of one shape."""
    _check_probability(p)
    least = threshold(p)
    return _of_words(lambda drawn: drawn >= least, torch.bool, words, tokens, sites, num_features, feature_offset)


def uniform(key: DropoutKey, num_features: int) -> Tensor:
    """Returns a number in [0, 1) for each feature of each token: float32 [*tokens.shape, num_features].

    It reads the same words as a dropout under the same ``key``: give each its own name or site.
    """
    sites, words = torch.full_like(key.tokens, key.site), philox_key(key.seed, key.step)
    # float32 has 24 significant bits
    return _of_words(
        lambda drawn: (drawn >> 8).float() * 2.0**-24, torch.float32, words, key.tokens, sites, num_features
    )


def philox_key(seed: int, step: int) -> tuple[int, int]:
    """Returns the two Philox key words for a seed's dropout masks at a step: 63 bits of the hash.

    Packed into an int64 they are never negative: with a negative key, Inductor's CPU code (torch 2.13) draws other
    words than eager torch.

    Raises ConfigError during CUDA graph capture: each replay would drop the elements of the captured step.
    """
    if is_capturing():
        raise ConfigError(
            f"a dropout key must not be captured in a CUDA graph, because every replay would drop the elements of step "
            f"{step}; pass no key, so that torch's generator draws the mask, or capture without dropout"
        )
    low, high = key_of(seed, f"dropout:{step}")
    return low, high & 0x7FFFFFFF


def threshold(p: float) -> int:
    """Returns the smallest word that keeps its element when a fraction ``p`` is dropped."""
    return int(p * 2**32)


def dropout(x: Tensor, p: float, key: DropoutKey, feature_offset: int = 0) -> Tensor:
    """Returns ``x`` [*tokens.shape, features], elements dropped by ``keep_mask`` and the rest scaled by 1 / (1 - p).

    Raises ShapeError if the shapes do not fit, ConfigError for a ``p`` outside [0, 1].
    """
    if x.dim() == 0 or x.shape[:-1] != key.tokens.shape:
        raise ShapeError(f"x must be {[*key.tokens.shape, 'features']}, one row per token id; got {list(x.shape)}")
    _check_probability(p)
    if p == 0.0:
        return x
    y: Tensor = _Dropout.apply(x, p, partial(keep_mask, key, p, x.shape[-1], feature_offset))
    return y


def attention_dropout(probs: Tensor, p: float, key: DropoutKey, head_offset: int = 0) -> Tensor:
    """Returns ``probs`` [B, A, Q, K], elements dropped by ``attention_keep_mask`` and the rest scaled by 1 / (1 - p).

    Raises ShapeError if ``key.tokens`` is not [B, Q], ConfigError as the mask does.
    """
    if probs.dim() != 4 or key.tokens.shape != (probs.shape[0], probs.shape[2]):
        raise ShapeError(
            f"probs must be [B, A, Q, K] for token ids [B, Q] = {list(key.tokens.shape)}; got {list(probs.shape)}"
        )
    _check_probability(p)
    if p == 0.0:
        return probs
    _, A, _, K = probs.shape
    y: Tensor = _Dropout.apply(probs, p, partial(attention_keep_mask, key, p, A, K, head_offset))
    return y


def _of_words(
    of: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    words: tuple[int | Tensor, int | Tensor],
    tokens: Tensor,
    sites: Tensor,
    num_features: int,
    feature_offset: int = 0,
) -> Tensor:
    """Applies ``of`` to the Philox words of ``tokens`` and ``sites``: [*tokens.shape, num_features] of ``dtype``."""
    skipped = feature_offset % 4
    quads = torch.arange(feature_offset // 4, -(-(feature_offset + num_features) // 4), device=tokens.device)

    def of_rows(tokens: Tensor, sites: Tensor) -> Tensor:
        drawn = philox4x32(*low_and_high(tokens[:, None]), quads, sites[:, None], *words)  # each [rows, quads]
        return of(torch.stack(drawn, dim=-1).flatten(-2))[:, skipped : skipped + num_features]

    shape, tokens, sites = (*tokens.shape, num_features), tokens.reshape(-1), sites.reshape(-1)
    if torch.compiler.is_compiling():
        return of_rows(tokens, sites).reshape(shape)  # the compiler does the blocking
    result = torch.empty(len(tokens), num_features, dtype=dtype, device=tokens.device)
    num_rows = max(1, counters_per_chunk(tokens.device) // max(1, len(quads)))
    for start in range(0, len(result), num_rows):
        rows = slice(start, start + num_rows)
        result[rows] = of_rows(tokens[rows], sites[rows])
    return result.view(shape)


class _Dropout(torch.autograd.Function):
    """x * keep / (1 - p), where ``keep`` computes the mask: once in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, keep: Callable[[], Tensor]) -> Tensor:
        ctx.p, ctx.keep = p, keep
        # a product rather than a select, so that NaN and inf propagate as in torch's dropout
        return x * keep() * (1.0 / (1.0 - p) if p < 1.0 else 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(dy, ctx.p, ctx.keep), None, None


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ConfigError(f"a dropout probability must be in [0, 1]; got {p}")
