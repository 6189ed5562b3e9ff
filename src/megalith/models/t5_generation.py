"""Generates text with a T5 for a batch of prompts of any lengths: greedy, sampled, or by beam search.

The keys and values of cross attention and of the decoder's tokens are cached. Prompts are padded and padding is masked,
so that an answer is the same, up to rounding, alone and in any batch. One rank chooses the tokens and sends them to the
others; otherwise rounding could make ranks disagree.

Beam search is that of transformers (Wu et al. 2016, arXiv:1609.08144, with a plain length penalty): of all
continuations of a prompt's beams the best are kept, and finished ones are ranked by their score divided by
length ** length_penalty. The encoder processes a prompt once, whatever the number of beams.
"""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalith.errors import ConfigError, NonFiniteError
from megalith.models.generation import Stop, check_length, check_tokens
from megalith.models.language_model import hidden_shape
from megalith.models.sampling import Sampling, check_seed, draw, uniform_numbers
from megalith.models.t5_model import T5Model
from megalith.parallel.pipeline.pipeline import Pipeline, evaluation_mode
from megalith.torch_compat.compiler import uncompiled
from megalith.transformer.encoder_output import PairedDocuments
from megalith.transformer.layer_context import FIRST_ROOM

__all__ = ["beam_search", "generate", "stream"]


def generate(
    model: T5Model | Pipeline[T5Model],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    start_token: int,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    end_tokens: Collection[int] = (),
) -> list[list[int]]:
    """Returns the decoder's tokens after ``start_token`` for each prompt, stopping before one of ``end_tokens``.

    All ranks of the model must call this together, with the same arguments.

    Args:
        start_token: the decoder's first input token; published T5 models use the padding token.
        seeds: one random seed per answer; by default 0, 1, 2 ...

    Raises:
        ConfigError: there are no prompts, or one is empty; the number of seeds differs; the number of tokens or a seed
            is out of range; sequence or context parallelism splits rows.
        NonFiniteError: no token can be sampled, because logits are NaN.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model,
        prompts,
        max_new_tokens,
        start_token=start_token,
        sampling=sampling,
        seeds=seeds,
        end_tokens=end_tokens,
    ):
        for answer, token in zip(answers, tokens, strict=True):
            if token is not None:
                answer.append(token)
    return answers


def stream(
    model: T5Model | Pipeline[T5Model],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    start_token: int,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    end_tokens: Collection[int] = (),
    stop: Stop | None = None,
) -> Generator[list[int | None], None, None]:
    """Yields the tokens of ``generate`` as they are sampled, one per answer; None for an answer that has ended.

    ``stop`` is called after each token of a row; if it returns True, the answer ends with that token. Raises the errors
    of ``generate``; ConfigError is raised by the call itself. The model is in evaluation mode while a token is sampled,
    and in its own mode between tokens.
    """
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ConfigError(f"generation needs one seed per prompt; got {len(prompts)} prompts and {len(seeds)} seeds")
    for seed in seeds:
        check_seed(seed)
    rows = _DecoderRows(model, prompts, max_new_tokens, start_token)
    numbers = uniform_numbers(seeds, torch.arange(max_new_tokens, device=rows.device).expand(len(prompts), -1))
    return _drawn(rows, numbers, sampling, end_tokens, stop)


@torch.no_grad()
def _drawn(
    rows: "_DecoderRows", numbers: Tensor, sampling: Sampling, end_tokens: Collection[int], stop: Stop | None
) -> Generator[list[int | None], None, None]:
    """Implements ``stream`` with the random ``numbers`` [B, steps]."""
    num_rows, num_steps = numbers.shape
    seen = torch.zeros(num_rows, rows.vocab_size, dtype=torch.bool, device=rows.device)
    seen.scatter_(1, rows.newest, True)
    alive, modules = set(range(num_rows)), rows.pipeline.modules()
    with rows.pipeline.holding_weights():
        for step in range(num_steps):
            # entered anew for each token: between tokens the caller may use the model, even to generate another text
            with evaluation_mode(modules), uncompiled(rows.layers):
                logits = rows.logits()
            drawn = rows.agreed(None if logits is None else draw(logits, sampling, seen, numbers[:, step]))
            tokens: list[int] = drawn.tolist()
            if max(tokens) >= rows.vocab_size:
                raise NonFiniteError("the model's logits contain NaN, so no token can be sampled")
            alive = {row for row in alive if tokens[row] not in end_tokens}
            yield [token if row in alive else None for row, token in enumerate(tokens)]
            alive = {row for row in alive if not (stop and stop(row, tokens[row]))}
            if not alive:
                return
            rows.append(drawn)
            seen.scatter_(1, drawn.unsqueeze(1), True)


@torch.no_grad()
def beam_search(
    model: T5Model | Pipeline[T5Model],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    start_token: int,
    num_beams: int,
    end_tokens: Collection[int] = (),
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Returns the best answer to each prompt that a search with ``num_beams`` finds; arguments as in ``generate``.

    Args:
        num_beams: how many unfinished answers to a prompt are extended per step, and how many finished ones are kept.
        length_penalty: positive values favor long answers, negative ones short answers.

    Raises the errors of ``generate``, and ConfigError for fewer than 1 beam.
    """
    if num_beams < 1:
        raise ConfigError(f"num_beams must be 1 or more; got {num_beams}; use 4")
    rows = _DecoderRows(model, prompts, max_new_tokens, start_token)
    searches = [_Search(num_beams, max_new_tokens, frozenset(end_tokens), length_penalty) for _ in prompts]
    scores = torch.full((len(prompts), num_beams), _UNLIKELY, dtype=torch.float64, device=rows.device)
    scores[:, 0] = 0.0  # all beams are equal at first, so only one counts
    num_kept = max(2, 1 + len(end_tokens)) * num_beams  # leaves num_beams even if each beam ends in every possible way
    with rows.pipeline.evaluating(), uncompiled(rows.layers):
        for step in range(max_new_tokens):
            logits = rows.logits()
            if step == 0:  # so far, one row stood for all beams of a prompt
                rows.repeat(num_beams)
                logits = None if logits is None else logits.repeat_interleave(num_beams, dim=0)
            best = None if logits is None else _continuations(logits, scores, num_kept)
            best = rows.agreed(best, (3, len(prompts), min(num_kept, num_beams * rows.vocab_size)))
            if not best[0].isfinite().all():
                raise NonFiniteError("the model's logits contain NaN, so beams cannot be ranked")
            columns = zip(*(part.tolist() for part in best), strict=True)
            steps = [search.go_on(*found) for search, found in zip(searches, columns, strict=True)]
            if not any(search.can_improve for search in searches):
                break
            scores = scores.new_tensor([[beam.score for beam in step] for step in steps])
            parents = [number * num_beams + beam.parent for number, step in enumerate(steps) for beam in step]
            rows.take(torch.tensor(parents, device=rows.device))
            rows.append(torch.tensor([beam.tokens[-1] for step in steps for beam in step], device=rows.device))
    return [search.best() for search in searches]


_UNLIKELY = -1e9  # log-probability of an unused beam


def _continuations(logits: Tensor, scores: Tensor, number: int) -> Tensor:
    """Scores, beams and tokens of the best continuations, float64 [3, prompts, number]; logits [prompts * beams, V]."""
    V = logits.shape[-1]
    log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    total = (log_probs.view(*scores.shape, V) + scores.unsqueeze(-1)).flatten(1)  # [prompts, beams * V]
    best, index = total.topk(min(number, total.shape[1]), dim=-1)
    return torch.stack((best, index // V, index % V))  # float64 represents every index exactly


@dataclass(frozen=True)
class _Beam:
    """The ``tokens`` of a beam, the sum of their log-probabilities, and the index of the beam that they extend."""

    score: float
    parent: int
    tokens: list[int]


@dataclass
class _Search:
    """The beams of one prompt.

    Attributes:
        running: unfinished beams, best first.
        finished: score and tokens of finished beams, best first, at most ``num_beams``.
        can_improve: whether a running beam may still beat a finished one, judging by its score so far.
    """

    num_beams: int
    max_new_tokens: int
    end_tokens: frozenset[int]
    length_penalty: float
    running: list[_Beam] = field(init=False)
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    can_improve: bool = True

    def __post_init__(self) -> None:
        self.running = [_Beam(0.0, beam, []) for beam in range(self.num_beams)]

    def go_on(self, scores: list[float], parents: list[float], tokens: list[float]) -> list[_Beam]:
        """Extends the beams by one token, given the best continuations, and returns them, best first."""
        texts = [[*self.running[int(parent)].tokens, int(token)] for parent, token in zip(parents, tokens, strict=True)]
        found = [_Beam(score, int(parent), text) for score, parent, text in zip(scores, parents, texts, strict=True)]
        length = len(found[0].tokens)

        def ends(beam: _Beam) -> bool:
            return beam.tokens[-1] in self.end_tokens or length == self.max_new_tokens

        if self.can_improve:
            for beam in found[: self.num_beams]:
                if ends(beam):
                    self.finished.append((beam.score / length**self.length_penalty, beam.tokens))
            self.finished = sorted(self.finished, key=lambda each: -each[0])[: self.num_beams]
        # if too few continue, finished beams fill up the rest with a score that cannot win
        going = [beam for beam in found if not ends(beam)]
        ended = [_Beam(_UNLIKELY, beam.parent, beam.tokens) for beam in found if ends(beam)]
        self.running = [*going, *ended][: self.num_beams]
        if len(self.finished) == self.num_beams:
            best = self.running[0].score / length**self.length_penalty
            self.can_improve = self.can_improve and best > self.finished[-1][0]
        return self.running

    def best(self) -> list[int]:
        """Returns the tokens of the best answer, without the end token."""
        if not self.finished:
            return []
        tokens = self.finished[0][1]
        return tokens[:-1] if tokens[-1] in self.end_tokens else tokens


class _DecoderRows:
    """The decoder's rows so far, all of the same length, and the forwards of the model over their newest tokens."""

    def __init__(
        self,
        model: T5Model | Pipeline[T5Model],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        start_token: int,
    ) -> None:
        check_length(max_new_tokens)
        if not prompts or not all(prompts):
            raise ConfigError("generation needs at least one prompt, and at least one token in each")
        self.pipeline = model if isinstance(model, Pipeline) else Pipeline([model])
        first = self.pipeline.chunks[0]
        self.config, self.options = first.config, first.options
        self.device = next(first.parameters()).device
        groups = self.groups = self.options.pg_collection
        if groups.size("cp") > 1 or self.options.sequence_parallel:
            raise ConfigError(
                "T5 generation decodes one token at a time, which cannot be split over ranks; use parallel.context=1 "
                "and parallel.sequence=false"
            )
        assert self.config.vocab_size is not None, "checked by T5Model"
        check_tokens(prompts, self.config.vocab_size)
        self.vocab_size = self.config.vocab_size
        self.layers = [layer for chunk in self.pipeline.chunks for layer in chunk.layers()]
        self.draws = groups.speaks_for_tokens and groups.rank("dp_cp") == 0
        B, Se = len(prompts), max(map(len, prompts))
        padded = [[*prompt, *[0] * (Se - len(prompt))] for prompt in prompts]
        self.unread = torch.tensor(padded, device=self.device)  # [B, Se], then [B, 0] once the encoder has read it
        self.newest = torch.full((B, 1), start_token, device=self.device)
        self.is_token = torch.arange(Se) < torch.tensor([[len(prompt)] for prompt in prompts])  # [B, Se]
        self.num_new, self.most = 0, max(max_new_tokens, 1)
        self.capacity = min(self.most, FIRST_ROOM)
        self.documents = self._documents()
        self.caches = {chunk: chunk.new_caches(self.capacity) for chunk in self.pipeline.chunks}

    def logits(self) -> Tensor | None:
        """Returns the logits of each row's next token, [B, V]; None if this rank does not choose tokens."""
        found: list[Tensor] = []

        def forward(model: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
            assert isinstance(model, T5Model), "the chunks of the pipeline must be T5Models"
            output: Tensor = model(
                self.unread, self.newest, documents=self.documents, caches=self.caches[model], hidden=hidden
            )
            if self.pipeline.holds_output(model):
                found.append(output[:, -1])
            return output

        B, Se = self.unread.shape
        shape = hidden_shape(self.config, self.options, B, Se + 1)
        self.pipeline.evaluate(1, forward, lambda _: shape)
        return found[-1] if found and self.draws else None

    def agreed(self, chosen: Tensor | None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Returns the choosing rank's ``chosen`` on all ranks: int64 [B], or float64 of ``shape``."""
        if chosen is None:
            kind = torch.int64 if shape is None else torch.float64
            chosen = torch.zeros(shape or (len(self.unread),), dtype=kind, device=self.device)
        self.groups.sum_over_model_(chosen)  # zeros on all ranks but the one that chooses
        return chosen

    def take(self, parents: Tensor) -> None:
        """Replaces row i by row ``parents[i]`` of the same prompt; ``parents`` is int64 [B]."""
        for caches in self.caches.values():
            for cache in caches.values():
                cache.take_rows_(parents)

    def repeat(self, times: int) -> None:
        """Repeats each row ``times`` times, with its cached keys and values."""
        for caches in self.caches.values():
            for cache in caches.values():
                cache.repeat_rows_(times)
        self.is_token = self.is_token.repeat_interleave(times, dim=0)
        self.documents = self._documents()

    def append(self, drawn: Tensor) -> None:
        """Appends one token to each row; ``drawn`` is [B]."""
        self.newest, self.unread = drawn.unsqueeze(1), drawn.new_empty(len(drawn), 0)
        self.num_new += 1
        if self.num_new == self.capacity < self.most:
            self.capacity = min(2 * self.capacity, self.most)
            for cache in (cache for caches in self.caches.values() for cache in caches.values()):
                cache.grow(self.capacity)
            self.documents = self._documents()  # in rows of the capacity

    def _documents(self) -> PairedDocuments | None:
        """Returns documents that exclude the padding of prompts; None if no prompt is padded."""
        if self.is_token.all():
            return None
        everywhere = torch.ones(len(self.is_token), self.capacity, dtype=torch.bool)
        return PairedDocuments.from_padding(self.is_token, everywhere).to(self.device)
