"""Our models as an ``LM`` of lm-eval (EleutherAI's lm-evaluation-harness), running in this process.

    from lm_eval import simple_evaluate
    results = simple_evaluate(model=harness_model(TextScorer.load("runs/mine")), tasks=["hellaswag"])

Each method takes the harness's requests, reads their ``args``, and returns one result per request.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megalith import optional
from megalith.errors import ConfigError
from megalith.models.sampling import Sampling
from megalith.models.scoring import score
from megalith.training.tasks.generation import stream_text
from megalith.training.tasks.text_scores import TextScorer

__all__ = ["harness_model"]

_OPTIONS_OF_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
# the generation options that a task may set
_GENERATION = frozenset(["until", "max_gen_toks", "do_sample", "temperature", *_OPTIONS_OF_SAMPLING])
_MAX_GEN_TOKS = 256  # default, as in the harness's own models


def harness_model(scorer: TextScorer) -> Any:
    """Wraps ``scorer`` as an ``lm_eval.api.model.LM``. Raises MissingDependencyError without lm-eval."""
    base = optional.need("lm_eval.api.model").LM
    return type("MegalithLM", (_Methods, base), {})(scorer)


class _Methods:
    """Implements the methods of the harness's ``LM``; a mixin to put before it in a class's bases."""

    cache_hook: Any  # set by LM; caches results

    def __init__(self, scorer: TextScorer) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, is greedy) of the continuation of each (context, continuation)."""
        scores = self.scorer.score([request.args for request in requests])
        found = [(each.log_likelihood, each.is_greedy) for each in scores]
        self._remember("loglikelihood", requests, found)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each (text,): each token once, with as much context as the windows allow."""
        windows = [list(self._windows(*request.args)) for request in requests]
        scores = iter(
            score(self.scorer.model, [pair for each in windows for pair in each], longest=self.scorer.longest)
        )
        found = [sum(next(scores).log_likelihood for _ in each) for each in windows]
        self._remember("loglikelihood_rolling", requests, found)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the completion of each context of (context, gen_kwargs), up to the first string of ``until``.

        Raises ConfigError for unknown options of a task, before anything is generated.
        """
        asked = [(context, self._options(gen_kwargs)) for context, gen_kwargs in (request.args for request in requests)]
        found = [self._generated(context, *options) for context, options in asked]
        self._remember("generate_until", requests, found)
        return found

    def _remember(self, method: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(method, request.args, result)

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yields windows of ``longest`` tokens, after the start of a document; the last gets context to fill it up."""
        beginning, longest = self.scorer.beginning, self.scorer.longest
        tokens = [*beginning, *self.scorer.tokenizer.encode(text)]
        for start in range(len(beginning), len(tokens), longest):
            stop = min(start + longest, len(tokens))
            yield tokens[max(0, stop - 1 - longest) : start], tokens[start:stop]

    def _options(self, gen_kwargs: Mapping[str, Any]) -> tuple[list[str], int, Sampling]:
        """Returns the stop strings, the number of tokens to generate, and the sampling parameters."""
        if unknown := gen_kwargs.keys() - _GENERATION:
            raise ConfigError(
                f"a task sets the unknown options {', '.join(sorted(unknown))}; it may set "
                f"{', '.join(sorted(_GENERATION))}"
            )
        room, until = self.scorer.longest, gen_kwargs.get("until") or []
        num_new = gen_kwargs.get("max_gen_toks", min(_MAX_GEN_TOKS, room - 1))
        if not 0 < num_new < room:
            raise ConfigError(
                f"max_gen_toks must be from 1 to {room - 1}, below the context length of the model; got {num_new}"
            )
        return [until] if isinstance(until, str) else list(until), num_new, _sampling(gen_kwargs)

    def _generated(self, context: str, stops: list[str], num_new: int, sampling: Sampling) -> str:
        tokenizer, room = self.scorer.tokenizer, self.scorer.longest
        prompt = (tokenizer.encode_prompts([context])[0] or [tokenizer.eod])[num_new - room :]
        pieces = stream_text(
            self.scorer.model,
            tokenizer,
            [prompt],
            num_new,
            sampling=sampling,
            seeds=[0],
            stop=stops,
        )
        return "".join(piece for [piece] in pieces if piece is not None)


def _sampling(gen_kwargs: Mapping[str, Any]) -> Sampling:
    """Returns greedy sampling, unless the task samples."""
    if not gen_kwargs.get("do_sample"):
        return Sampling(0.0, repetition_penalty=gen_kwargs.get("repetition_penalty"))
    return Sampling(gen_kwargs.get("temperature", 1.0), **{name: gen_kwargs.get(name) for name in _OPTIONS_OF_SAMPLING})
