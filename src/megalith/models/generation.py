"""Sampling text from a causal language model, one token at a time, with keys and values kept.

Temperature divides the logits; top-k keeps the k largest; top-p keeps the smallest set of tokens whose probabilities
add up to p (Holtzman et al. 2019, arXiv:1904.09751). Temperature 0 takes the largest.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel

__all__ = ["Sampling", "check_length", "check_seed", "draw_token", "generate", "stream"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Raises:
        ConfigError: a temperature below 0 or not finite, a top_k below 1, or a top_p outside (0, 1].
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature must be 0 (the likeliest token) or more, and finite; got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be 1 or more; got {self.top_k}; leave it out to keep all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be in (0, 1]; got {self.top_p}; leave it out to keep all tokens")


def check_length(max_new_tokens: int) -> None:
    """Raises ConfigError for a number of tokens below 0."""
    if max_new_tokens < 0:
        raise ConfigError(f"the number of new tokens must be 0 or more; got {max_new_tokens}; use 128")


def check_seed(seed: int) -> None:
    """Raises ConfigError for a seed that is not in [0, 2^63)."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"the seed must be 0 or more and below 2^63; got {seed}; use 0")


def generate(
    model: GPTModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    seed: int,
    end_token: int | None = None,
) -> list[int]:
    """The tokens that follow ``prompt``: at most ``max_new_tokens``, ending before ``end_token``.

    A model with learned positions stops where they end. The same ``seed`` gives the same tokens on one device type.

    Raises:
        ConfigError: the prompt is empty, or already as long as the model's positions; a number of tokens or a seed
            that means nothing.
    """
    return list(stream(model, prompt, max_new_tokens, sampling=sampling, seed=seed, end_token=end_token))


def stream(
    model: GPTModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    seed: int,
    end_token: int | None = None,
) -> Generator[int, None, None]:
    """The tokens of ``generate``, each as soon as it is drawn; raises, as that does, at the call itself.

    The model is in evaluation mode until the generator ends or is closed.
    """
    check_length(max_new_tokens)
    check_seed(seed)
    if not prompt:
        raise ConfigError("the prompt has no tokens; give some text to go on from")
    limit = model.config.max_position_embeddings if model.model.embed_positions is not None else None
    if limit is not None:
        if len(prompt) >= limit:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the model {limit} positions; shorten the prompt"
            )
        max_new_tokens = min(max_new_tokens, limit - len(prompt))
    return _drawn(model, prompt, max_new_tokens, sampling, seed, end_token)


@torch.no_grad()
def _drawn(
    model: GPTModel, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, seed: int, end_token: int | None
) -> Generator[int, None, None]:
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    caches = model.new_caches()
    was_training = model.training
    model.eval()
    tokens = torch.tensor([list(prompt)], device=device)
    try:
        for _ in range(max_new_tokens):
            logits = model(tokens, caches=caches)[0, -1]  # [V]
            token = draw_token(logits, sampling, generator)
            if token == end_token:
                break
            yield token
            tokens = torch.tensor([[token]], device=device)
    finally:
        model.train(was_training)


def draw_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One of the tokens [V], floating; ``generator`` is of the device of ``logits``."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    # at most 0, so that no temperature makes it overflow; a divisor that rounds to 0 would make it NaN
    logits = (logits - logits.max()) / max(sampling.temperature, torch.finfo(logits.dtype).tiny)
    if sampling.top_k is not None:
        smallest = logits.topk(min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # the first token is always kept
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
