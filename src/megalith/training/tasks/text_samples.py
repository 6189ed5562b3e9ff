"""Text from a GPT in training: what it adds to the prompts of ``train.generation``, in any layout.

Every token is one forward over the whole text so far, padded to the length that it may reach: keys and values are not
kept, because sequence and context parallelism split a sequence and cannot split one new token. One rank draws, and the
others take its tokens, or rounding would let ranks disagree on where a text ends. Up to rounding a text is the one that
``megalith generate`` draws from a checkpoint of the same step, with its default seed.
"""

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.config import RunConfig
from megalith.data.tokenizer import TextStream, Tokenizer
from megalith.models.generation import Sampling, draw_token
from megalith.models.gpt_model import hidden_shape
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_join, zigzag_positions
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.topology.collectives import gather_from_sequence_parallel_region
from megalith.training.prompts import encode_prompts
from megalith.training.tasks.task import TextSample

__all__ = ["GPTTextWriter"]

_SEED = 0  # the default of megalith generate


class GPTTextWriter:
    """A ``TextWriter`` for next-token models.

    Raises:
        ConfigError: as ``encode_prompts``.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, options: BuildOptions, device: torch.device) -> None:
        generation = config.train.generation
        assert generation is not None, "asked for by a run with train.generation"
        self.prompts = encode_prompts(config, tokenizer)
        self.texts = generation.prompts
        self.config = config.model
        self.tokenizer = tokenizer
        self.sampling = Sampling(generation.temperature)
        self.device = device
        self.options = options
        groups = options.pg_collection
        self.together = groups.mesh is not None
        self.draws = groups.speaks_for_tokens and groups.rank("dp_cp") == 0
        # what a text may grow to, in a length that context and sequence parallelism can split
        cp, tp = groups.size("cp"), groups.size("tp")
        multiple = lcm(2 * cp if cp > 1 else 1, cp * tp if options.sequence_parallel else 1)
        S = -(-(max(map(len, self.prompts)) + generation.max_new_tokens) // multiple) * multiple
        positions = config.model.max_position_embeddings
        self.seq_length = S if positions is None else min(S, positions // multiple * multiple)
        self.max_new_tokens = generation.max_new_tokens

    @torch.no_grad()
    def __call__(self, pipeline: Pipeline[Any]) -> list[TextSample]:
        """One sample a prompt; modes and gathered weights are afterwards what they were."""
        with pipeline.evaluating():
            tokens = self._tokens(pipeline)
        return [
            TextSample(text, self._decoded(prompt, new))
            for text, prompt, new in zip(self.texts, self.prompts, tokens, strict=True)
        ]

    def _tokens(self, pipeline: Pipeline[Any]) -> list[list[int]]:
        """The tokens that follow each prompt, as ``models.generation.generate`` draws them."""
        generators = [torch.Generator(self.device).manual_seed(_SEED) for _ in self.prompts]
        texts = [list(prompt) for prompt in self.prompts]
        growing = {row for row, text in enumerate(texts) if len(text) < self.seq_length}
        for _ in range(self.max_new_tokens):
            if not growing:
                break
            logits = self._logits(pipeline, texts)  # [P, S, V]
            drawn = torch.zeros(len(texts), dtype=torch.int64, device=self.device)
            if self.draws:
                for row in growing:
                    drawn[row] = draw_token(logits[row, len(texts[row]) - 1], self.sampling, generators[row])
            if self.together:
                dist.all_reduce(drawn)  # of zeros, but for the rank that draws
            tokens = drawn.tolist()
            growing = {row for row in growing if tokens[row] != self.tokenizer.eod}
            for row in growing:
                texts[row].append(tokens[row])
            growing = {row for row in growing if len(texts[row]) < self.seq_length}
        return [text[len(prompt) :] for text, prompt in zip(texts, self.prompts, strict=True)]

    def _logits(self, pipeline: Pipeline[Any], texts: Sequence[Sequence[int]]) -> Tensor:
        """Of every position of the texts, padded behind their ends: [P, S, V], in the last stage."""
        S, groups = self.seq_length, self.options.pg_collection
        tokens = torch.tensor([[*text, *[0] * (S - len(text))] for text in texts], device=self.device)  # [P, S]
        mine = torch.arange(S) if groups.cp is None else zigzag_positions(S, groups.size("cp"), groups.rank("cp"))
        mine = mine.to(self.device)  # [S/cp]
        found: list[Tensor] = []

        def forward(model: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
            found.append(model(tokens[:, mine], position_ids=mine, hidden=hidden))
            return found[-1]

        pipeline.evaluate(1, forward, lambda _: hidden_shape(self.config, self.options, len(texts), len(mine)))
        logits = found[-1]
        if groups.cp is None or not groups.speaks_for_tokens:
            return logits
        parts = gather_from_sequence_parallel_region(logits.transpose(0, 1), groups.cp)  # [S, P, V]
        return zigzag_join(parts, groups.size("cp")).transpose(0, 1)

    def _decoded(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        text = TextStream(self.tokenizer, prompt)
        return "".join([*map(text.add, tokens), text.end()])
