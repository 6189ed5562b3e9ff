"""Samples the next token from logits [B, V] with Hugging Face's logits processors, in their order.

    repetition penalty r   l = l / r where l > 0, l * r elsewhere, for tokens already in the text   arXiv:1909.05858
    temperature t          l = l / t; 0 is greedy and skips the steps below
    top-k                  keeps the k largest
    top-p                  keeps the smallest set of tokens with a total probability of p or more   arXiv:1904.09751
    min-p                  keeps tokens at least p times as likely as the most likely one           arXiv:2407.01082

The random number that samples a token depends only on (seed, position in the text), so that a text is the same alone
and in any batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.numerics.philox import key_of, low_and_high, philox4x32

__all__ = ["Sampling", "check_seed", "draw", "processed", "uniform_numbers"]

_NONE_LEFT = float("-inf")


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token; None disables an option.

    Raises:
        ConfigError: a temperature that is negative or not finite, a top_k below 1, a top_p outside (0, 1], a min_p
            outside [0, 1], or a repetition_penalty that is not positive and finite.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, and finite; got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be 1 or more; got {self.top_k}; leave it out to keep all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be in (0, 1]; got {self.top_p}; leave it out to keep all tokens")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p must be in [0, 1]; got {self.min_p}; leave it out to keep all tokens")
        if self.repetition_penalty is not None and not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty must be positive and finite; got {self.repetition_penalty}; 1.1 discourages "
                "repetition, and 1 has no effect"
            )


def check_seed(seed: int) -> None:
    """Raises ConfigError unless ``seed`` is in [0, 2^63)."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"the seed must be 0 or more and below 2^63; got {seed}; use 0")


def uniform_numbers(seeds: Sequence[int], positions: Tensor) -> Tensor:
    """Returns float64 random numbers in [0, 1) for ``positions``, int64 [B, n], with one seed per row."""
    keys = torch.tensor([key_of(seed, "generation") for seed in seeds], device=positions.device)  # [B, 2]
    low, high = low_and_high(positions)
    zero = torch.zeros_like(positions)
    upper, lower, _, _ = philox4x32(low, high, zero, zero, keys[:, :1], keys[:, 1:])
    return ((upper >> 5) * 2**26 + (lower >> 6)).double() * 2.0**-53  # 27 + 26 bits: the precision of float64


def draw(logits: Tensor, sampling: Sampling, seen: Tensor | None, uniform: Tensor) -> Tensor:
    """Samples a token for each row of ``logits`` [B, V]: int64 [B].

    A row with a NaN among its logits gets V, which is no token.

    Args:
        seen: bool [B, V], the tokens already in each text; only used by the repetition penalty.
        uniform: float64 [B], the random numbers; unused at temperature 0.
    """
    kept = processed(logits, sampling, seen)
    if sampling.temperature == 0.0:
        best, token = kept.max(dim=-1)  # NaN if one of them is
        return token.masked_fill(best.isnan(), kept.shape[-1])
    # inverse transform sampling: one random number per token, whatever the size of the vocabulary
    cumulative = torch.softmax(kept, dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [B, V]
    return torch.searchsorted(cumulative, uniform.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)


def processed(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Returns ``logits`` [B, V] after all processors, in float32 or wider; -inf for tokens that are not kept."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.repetition_penalty is not None:
        assert seen is not None, "the repetition penalty needs the tokens of each text"
        factor = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
    if sampling.temperature == 0.0:
        return logits
    # shifted to at most 0, so that no temperature overflows; a divisor that rounds to 0 would give NaN
    largest = logits.amax(dim=-1, keepdim=True)
    logits = (logits - largest) / max(sampling.temperature, torch.finfo(logits.dtype).tiny)
    if sampling.top_k is not None:
        smallest = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, _NONE_LEFT)
    if sampling.top_p is not None:
        ordered, order = logits.sort(dim=-1)
        beyond = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - sampling.top_p
        beyond[:, -1] = False  # the most likely token is always kept
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), _NONE_LEFT)
    if sampling.min_p is not None:
        probabilities = logits.softmax(dim=-1)
        unlikely = probabilities < sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(unlikely, _NONE_LEFT)
    return logits
