"""Generates text from a GPT or a T5 during training: completions of the prompts of ``train.generation``, or answers.

Up to rounding, a text is the one that ``megalith generate`` draws from a checkpoint of the same step, with its default
seed, and for a T5 with --special-tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from megalith.config import RunConfig
from megalith.data.special_tokens import t5_tokens
from megalith.data.tokenizer import TextStream, Tokenizer
from megalith.models import generation, t5_generation
from megalith.models.sampling import Sampling
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.training.tasks.prompts import encode_prompts
from megalith.training.tasks.task import TextSample

__all__ = ["GPTTextWriter", "T5TextWriter"]

_SEED = 0  # the default of megalith generate


class _RunTextWriter(ABC):
    """A ``TextWriter`` for the prompts of a run's settings.

    Attributes:
        answers: whether the model writes a separate text instead of continuing the prompt.

    Raises:
        ConfigError, DataError: as ``encode_prompts``.
    """

    answers: ClassVar[bool]

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        assert config.train.generation is not None, "only used with train.generation"
        self.settings = config.train.generation
        self.prompts = encode_prompts(config, tokenizer)
        self.tokenizer = tokenizer

    def __call__(self, pipeline: Pipeline[Any]) -> list[TextSample]:
        """Returns one sample per prompt; restores the model's modes and gathered weights afterwards."""
        sampling, seeds = Sampling(self.settings.temperature), [_SEED] * len(self.prompts)
        texts = self._tokens(pipeline, self.settings.max_new_tokens, sampling, seeds)
        return [
            TextSample(text, self._decoded(prompt, new))
            for text, prompt, new in zip(self.settings.prompts, self.prompts, texts, strict=True)
        ]

    @abstractmethod
    def _tokens(
        self, pipeline: Pipeline[Any], max_new_tokens: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[int]]:
        """Generates the tokens that follow each prompt."""

    def _decoded(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        text = TextStream(self.tokenizer, () if self.answers else prompt)
        return "".join([*map(text.add, tokens), text.end()])


class GPTTextWriter(_RunTextWriter):
    """Continues prompts with a next-token model."""

    answers = False

    def _tokens(
        self, pipeline: Pipeline[Any], max_new_tokens: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[int]]:
        ends = self.tokenizer.ends
        return generation.generate(
            pipeline, self.prompts, max_new_tokens, sampling=sampling, seeds=seeds, end_tokens=ends
        )


class T5TextWriter(_RunTextWriter):
    """Fills the gaps marked by sentinels in a prompt, with an encoder-decoder model."""

    answers = True

    def _tokens(
        self, pipeline: Pipeline[Any], max_new_tokens: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[int]]:
        return t5_generation.generate(
            pipeline,
            self.prompts,
            max_new_tokens,
            start_token=t5_tokens(self.tokenizer).padding,
            sampling=sampling,
            seeds=seeds,
            end_tokens=self.tokenizer.ends,
        )
