"""Text from a GPT in training: what it adds to the prompts of ``train.generation``, in any layout.

Up to rounding a text is the one that ``megalith generate`` draws from a checkpoint of the same step, with its default
seed.
"""

from collections.abc import Sequence
from typing import Any

from megalith.config import RunConfig
from megalith.data.tokenizer import TextStream, Tokenizer
from megalith.models.generation import generate
from megalith.models.sampling import Sampling
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.training.prompts import encode_prompts
from megalith.training.tasks.task import TextSample

__all__ = ["GPTTextWriter"]

_SEED = 0  # the default of megalith generate


class GPTTextWriter:
    """A ``TextWriter`` for next-token models.

    Raises:
        ConfigError: as ``encode_prompts``.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        generation = config.train.generation
        assert generation is not None, "asked for by a run with train.generation"
        self.prompts = encode_prompts(config, tokenizer)
        self.generation = generation
        self.tokenizer = tokenizer

    def __call__(self, pipeline: Pipeline[Any]) -> list[TextSample]:
        """One sample a prompt; modes and gathered weights are afterwards what they were."""
        texts = generate(
            pipeline,
            self.prompts,
            self.generation.max_new_tokens,
            sampling=Sampling(self.generation.temperature),
            seeds=[_SEED] * len(self.prompts),
            end_tokens=self.tokenizer.ends,
        )
        return [
            TextSample(text, self._decoded(prompt, new))
            for text, prompt, new in zip(self.generation.prompts, self.prompts, texts, strict=True)
        ]

    def _decoded(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        text = TextStream(self.tokenizer, prompt)
        return "".join([*map(text.add, tokens), text.end()])
