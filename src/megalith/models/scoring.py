"""Computes the log-likelihood of continuations of contexts under a language model, in batches.

log p(y | x) = sum over i of log softmax(logits at the token before y_i)[y_i], in nats. Rows are padded on the right,
which a causal model does not see.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel

__all__ = ["Score", "score"]

# limits of a batch, padding included, which a single row may exceed: tokens that the layers process, and logits
# (2^26 in float32 are 256 MiB)
_TOKENS_AT_ONCE, _LOGITS_AT_ONCE = 4096, 1 << 26


@dataclass(frozen=True)
class Score:
    """The score of a continuation under a model.

    Attributes:
        log_likelihood: nats, summed over its ``num_tokens`` tokens.
        is_greedy: whether each of its tokens is the most likely one given those before it.
        num_cut: tokens dropped from the beginning of the context because not all fit.
    """

    log_likelihood: float
    is_greedy: bool
    num_tokens: int
    num_cut: int


@torch.no_grad()
def score(
    model: GPTModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    longest: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """Returns the score of each (context, continuation) pair of token ids; the model's training mode is restored.

    Args:
        longest: maximum number of tokens per forward; of a longer context the end is kept.
        progress: called with (pairs done, number of pairs), at the start and after every batch.

    Raises:
        ConfigError: a context or a continuation is empty, or a continuation has more than ``longest`` tokens.
    """
    V = model.config.vocab_size
    assert V is not None, "checked by GPTModel"
    for context, continuation in pairs:
        if not context or not 0 < len(continuation) <= longest:
            raise ConfigError(
                f"a context must have at least one token, and a continuation 1 to {longest}, the maximum for one "
                f"forward; got {len(context)} and {len(continuation)}"
            )
    found: dict[int, Score] = {}
    was_training = model.training
    model.eval()
    progress(0, len(pairs))
    try:
        for numbers in _batches(pairs, longest, _LOGITS_AT_ONCE // V):
            batch = [pairs[number] for number in numbers]
            found |= zip(numbers, _scores(model, batch, longest), strict=True)
            progress(len(found), len(pairs))
    finally:
        model.train(was_training)
    return [found[number] for number in range(len(pairs))]


def _batches(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int, positions_at_once: int
) -> Iterator[list[int]]:
    """Yields batches of pair indices, by length and longest first, so that running out of memory shows at once.

    ``positions_at_once``: for how many positions a batch of more than one row may compute logits.
    """
    lengths = [min(len(context) + len(continuation) - 1, longest) for context, continuation in pairs]
    in_order = sorted(range(len(pairs)), key=lambda number: -lengths[number])
    while in_order:
        S, size, kept = lengths[in_order[0]], 0, 0
        for number in in_order[: max(1, _TOKENS_AT_ONCE // S)]:
            kept = max(kept, S - lengths[number] + len(pairs[number][1]))  # from the first prediction on
            if size and (size + 1) * kept > positions_at_once:
                break
            size += 1
        yield in_order[:size]
        in_order = in_order[size:]


def _scores(model: GPTModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int) -> Iterator[Score]:
    """Scores one batch; the last token of a pair is predicted but not part of the input."""
    rows = [[*context, *continuation][:-1][-longest:] for context, continuation in pairs]
    S = max(map(len, rows))
    device = next(model.parameters()).device
    tokens = torch.tensor([row + [0] * (S - len(row)) for row in rows], device=device)  # [B, S]
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    kept = max(S - len(row) + len(continuation) for row, (_, continuation) in zip(rows, pairs, strict=True))
    is_token = torch.arange(S, device=device) < lengths  # [B, S]
    logits: Tensor = model(tokens, logits_to_keep=kept, padding_mask=is_token)  # [B, kept, V]
    wanted = torch.tensor([token for _, continuation in pairs for token in continuation], device=device)
    likelihoods, are_greedy = [], []
    lengths_wanted = [len(continuation) for _, continuation in pairs]
    for row, of_row, tokens_wanted in zip(rows, logits, wanted.split(lengths_wanted), strict=True):
        end = len(row) - S + kept
        predicted = of_row[end - len(tokens_wanted) : end]  # [continuation, V]
        log_probabilities = predicted.to(torch.promote_types(predicted.dtype, torch.float32)).log_softmax(dim=-1)
        likelihoods.append(log_probabilities.gather(-1, tokens_wanted.unsqueeze(-1)).sum())
        are_greedy.append((predicted.argmax(dim=-1) == tokens_wanted).all())
    # the host waits for the device once
    found = zip(torch.stack(likelihoods).tolist(), torch.stack(are_greedy).tolist(), strict=True)
    for row, (context, continuation), (likelihood, is_greedy) in zip(rows, pairs, found, strict=True):
        num_cut = len(context) + len(continuation) - 1 - len(row)
        yield Score(likelihood, is_greedy, len(continuation), num_cut)
