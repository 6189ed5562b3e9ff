"""Text from a GPT in training: what it adds to the prompts of ``train.generation``, in any layout.

Every token is one forward over the whole text so far, padded to the length that it may reach: keys and values are not
kept, because sequence and context parallelism split a sequence and cannot split one new token. Rank 0 draws, and the
others take its tokens, or rounding would let ranks disagree on where a text ends. Up to rounding a text is the one that
``megalith generate`` draws from a checkpoint of the same step, with its default seed.
"""

from collections.abc import Sequence
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.config import RunConfig
from megalith.data.tokenizer import TextStream, Tokenizer
from megalith.models.generation import Sampling, draw_token
from megalith.parallel.context.zigzag import zigzag_join, zigzag_positions
from megalith.parallel.pipeline.executor import execute
from megalith.parallel.pipeline.plan import one_stage_plan
from megalith.parallel.sharding.fsdp import release_gathered_weights
from megalith.topology.collectives import gather_from_sequence_parallel_region
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.prompts import encode_prompts
from megalith.training.tasks.task import TextSample

__all__ = ["GPTTextWriter"]

_SEED = 0  # the default of megalith generate


class GPTTextWriter:
    """A ``TextWriter`` for next-token models.

    Raises:
        ConfigError: as ``encode_prompts``.
    """

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, pg_collection: ProcessGroupCollection, device: torch.device
    ) -> None:
        generation = config.train.generation
        assert generation is not None, "asked for by a run with train.generation"
        self.prompts = encode_prompts(config, tokenizer)
        self.texts = generation.prompts
        self.tokenizer = tokenizer
        self.sampling = Sampling(generation.temperature)
        self.device = device
        self.together = pg_collection.mesh is not None
        self.draws = not self.together or dist.get_rank() == 0
        self.cp_group = pg_collection.cp
        # what a text may grow to, in a length that context and sequence parallelism can split
        cp, tp = pg_collection.size("cp"), pg_collection.size("tp")
        multiple = lcm(2 * cp if cp > 1 else 1, cp * tp if config.parallel.sequence else 1)
        S = -(-(max(map(len, self.prompts)) + generation.max_new_tokens) // multiple) * multiple
        positions = config.model.max_position_embeddings
        self.seq_length = S if positions is None else min(S, positions // multiple * multiple)
        self.max_new_tokens = generation.max_new_tokens

    @torch.no_grad()
    def __call__(self, chunks: Sequence[nn.Module]) -> list[TextSample]:
        """One sample a prompt; modes and gathered weights are afterwards what they were."""
        training = [chunk.training for chunk in chunks]
        for chunk in chunks:
            chunk.eval()
        tokens = self._tokens(chunks)
        for chunk, was_training in zip(chunks, training, strict=True):
            release_gathered_weights(chunk)
            chunk.train(was_training)
        return [
            TextSample(text, self._decoded(prompt, new))
            for text, prompt, new in zip(self.texts, self.prompts, tokens, strict=True)
        ]

    def _tokens(self, chunks: Sequence[nn.Module]) -> list[list[int]]:
        """The tokens that follow each prompt, as ``models.generation.generate`` draws them."""
        generators = [torch.Generator(self.device).manual_seed(_SEED) for _ in self.prompts]
        texts = [list(prompt) for prompt in self.prompts]
        growing = {row for row, text in enumerate(texts) if len(text) < self.seq_length}
        for _ in range(self.max_new_tokens):
            if not growing:
                break
            logits = self._logits(chunks, texts)  # [P, S, V]
            drawn = torch.zeros(len(texts), dtype=torch.int64, device=self.device)
            if self.draws:
                for row in growing:
                    drawn[row] = draw_token(logits[row, len(texts[row]) - 1], self.sampling, generators[row])
            if self.together:
                dist.broadcast(drawn, src=0)
            tokens = drawn.tolist()
            growing = {row for row in growing if tokens[row] != self.tokenizer.eod}
            for row in growing:
                texts[row].append(tokens[row])
            growing = {row for row in growing if len(texts[row]) < self.seq_length}
        return [text[len(prompt) :] for text, prompt in zip(texts, self.prompts, strict=True)]

    def _logits(self, chunks: Sequence[nn.Module], texts: Sequence[Sequence[int]]) -> Tensor:
        """Of every position of the texts, padded behind their ends: [P, S, V], whole on every rank."""
        padded = [[*text, *[0] * (self.seq_length - len(text))] for text in texts]
        tokens = torch.tensor(padded, device=self.device)  # [P, S]
        found: list[Tensor] = []

        def forward(model: nn.Module, micro_batch: int) -> Tensor:
            found.append(model(tokens) if self.cp_group is None else self._joined(model, tokens, self.cp_group))
            return found[-1]

        execute(one_stage_plan(1, backward=False), chunks, forward)
        return found[-1]

    def _joined(self, model: nn.Module, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The logits of whole texts, [P, S, V], of a model of which every rank of cp computes a part of the rows."""
        mine = zigzag_positions(self.seq_length, group.size(), group.rank()).to(self.device)  # [S/cp]
        logits: Tensor = model(tokens[:, mine], position_ids=mine)  # [P, S/cp, V]
        parts = gather_from_sequence_parallel_region(logits.transpose(0, 1), group)  # [S, P, V]
        return zigzag_join(parts, group.size()).transpose(0, 1)

    def _decoded(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        text = TextStream(self.tokenizer, prompt)
        return "".join([*map(text.add, tokens), text.end()])
