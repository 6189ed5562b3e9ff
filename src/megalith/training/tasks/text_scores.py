"""Computes log-likelihoods of text: a model, its tokenizer, and pairs of texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.data.tokenizer import Tokenizer
from megalith.models.gpt_model import GPTModel
from megalith.models.scoring import Score, score
from megalith.training.tasks.generation import TextSource

__all__ = ["TextScorer"]


@dataclass(frozen=True)
class TextScorer:
    """Scores text with ``model``; ``longest``: the number of tokens that it reads at once."""

    model: GPTModel
    tokenizer: Tokenizer
    longest: int

    @classmethod
    def load(
        cls, source: str | Path, tokenizer: str | Path | None = None, eod: str | int | None = None
    ) -> "TextScorer":
        """Loads ``source``; arguments and errors are those of ``TextSource.open``.

        A run's model reads as many tokens at once as it was trained on, ``data.seq_length``.
        """
        opened = TextSource.open(source, tokenizer, eod, to_score=True)
        model = opened.load_model()
        assert isinstance(model, GPTModel), "neither a BERT nor a T5"
        return cls(model, opened.tokenizer, opened.longest)

    def encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the token ids of both, split as in lm-eval.

        Trailing spaces of the context count as part of the continuation, where most tokenizers have them. Both are
        encoded together, and the ids beyond those of the context alone are the continuation. The context begins as a
        document does: with the tokenizer's ``begin``. An empty context becomes ``beginning``.
        """
        kept = context.rstrip()
        if not kept:
            return self.beginning, self.tokenizer.encode(context + continuation)
        before, whole = self.tokenizer.encode_batch([kept, context + continuation])
        return [*self.tokenizer.begin, *before], whole[len(before) :]

    @property
    def beginning(self) -> list[int]:
        """The tokens before a document's first token; never empty, because a likelihood needs a preceding token."""
        return list(self.tokenizer.begin or [self.tokenizer.eod])

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Score]:
        """Scores each (context, continuation). Raises ConfigError as ``models.scoring.score`` does."""
        encoded = [self.encode(context, continuation) for context, continuation in pairs]
        return score(self.model, encoded, longest=self.longest, progress=progress)
