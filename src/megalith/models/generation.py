"""Text from a causal language model, token by token, for a batch of prompts of any lengths, in any layout.

Prompts stand left-padded in rows whose newest tokens are in one column: a row is two documents, its padding and its
text, and positions count from where the text begins. So a text is up to rounding the same alone and in any batch. Keys
and values are kept, unless sequence or context parallelism splits the rows: one new token cannot be split, and then
every token is a forward over the whole text so far.

One rank draws, and the others take its tokens, or rounding would let ranks disagree on where a text ends.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from math import lcm

import torch
from torch import Tensor, nn

from megalith.acceleration.replay import Replayed
from megalith.config import TransformerConfig
from megalith.errors import ConfigError, NonFiniteError
from megalith.fusions.core.blocks import LARGEST_WHOLE
from megalith.fusions.core.dispatch import chosen_by_use, use
from megalith.models.gpt_model import GPTModel
from megalith.models.language_model import hidden_shape
from megalith.models.sampling import Sampling, check_seed, draw, uniform_numbers
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.parallel.inference_linear import inference_linear
from megalith.parallel.pipeline.pipeline import Pipeline, evaluation_mode
from megalith.topology.collectives import reduce_from_tensor_model_parallel_region
from megalith.torch_compat import ForwardParts, has_forward_hooks, uncompiled
from megalith.transformer.layer_context import KVCache

__all__ = ["Stop", "check_length", "check_prompt_length", "generate", "stream"]

# tokens of a row that memory is taken for beside the prompt; then twice as many whenever it is full
_FIRST_ROOM = 1024

# (row, the token that it has just got) -> whether its text ends with that
Stop = Callable[[int, int], bool]


def check_length(max_new_tokens: int) -> None:
    """Raises ConfigError for a number of tokens below 0."""
    if max_new_tokens < 0:
        raise ConfigError(f"the number of new tokens must be 0 or more; got {max_new_tokens}; use 128")


def check_prompt_length(num_tokens: int, num_positions: int | None) -> None:
    """Raises ConfigError for a prompt of no tokens, or of as many as there are learned positions; None: no end."""
    if not num_tokens:
        raise ConfigError("the prompt has no tokens; give some text to go on from")
    if num_positions is not None and num_tokens >= num_positions:
        raise ConfigError(
            f"the prompt has {num_tokens} tokens and the model {num_positions} positions; shorten the prompt"
        )


def generate(
    model: GPTModel | Pipeline[GPTModel],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    end_tokens: Collection[int] = (),
    stop: Stop | None = None,
) -> list[list[int]]:
    """The tokens that follow each of ``prompts``: at most ``max_new_tokens``, ending before one of ``end_tokens``.

    A text ends where learned positions end. The same seed gives the same text on one device type, alone and in any
    batch, up to rounding of the logits. All ranks of the model call this together, with the same arguments.

    Args:
        seeds: of the random numbers of each text; by default 0, 1, 2 ...
        stop: asked after each token of a row; the text ends with that token where it says so. Every rank asks.

    Raises:
        ConfigError: there is no prompt, or one is empty or as long as the model's positions; not a seed for each; a
            number of tokens or a seed that means nothing.
        NonFiniteError: no token can be drawn, because logits are NaN.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model, prompts, max_new_tokens, sampling=sampling, seeds=seeds, end_tokens=end_tokens, stop=stop
    ):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None:
                text.append(token)
    return texts


def stream(
    model: GPTModel | Pipeline[GPTModel],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    end_tokens: Collection[int] = (),
    stop: Stop | None = None,
) -> Generator[list[int | None], None, None]:
    """The tokens of ``generate``, one for each text as soon as they are drawn; None for a text that has ended.

    Raises as that does, ConfigError at the call itself. The model is in evaluation mode while a token is drawn, and in
    its own mode between tokens. Then its weights, hooks and modules may be changed, which counts from the next token
    on; but not how many layers there are, nor weights that FSDP shards or that stages of a pipeline share. Plain
    numbers and methods that a module has by the first tokens may stay in force.
    """
    check_length(max_new_tokens)
    seeds = range(len(prompts)) if seeds is None else seeds
    if not prompts or len(seeds) != len(prompts):
        raise ConfigError(
            f"generation needs one prompt or more, and a seed for each; got {len(prompts)} prompts and "
            f"{len(seeds)} seeds"
        )
    for seed in seeds:
        check_seed(seed)
    pipeline = model if isinstance(model, Pipeline) else Pipeline([model])
    num_positions = _num_positions(pipeline.chunks[0])
    lengths = [len(prompt) for prompt in prompts]
    for length in lengths:
        check_prompt_length(length, num_positions)
    room = [max_new_tokens if num_positions is None else min(max_new_tokens, num_positions - n) for n in lengths]
    return _drawn(pipeline, prompts, room, sampling, seeds, end_tokens, stop)


@torch.no_grad()
def _drawn(
    pipeline: Pipeline[GPTModel],
    prompts: Sequence[Sequence[int]],
    room: Sequence[int],
    sampling: Sampling,
    seeds: Sequence[int],
    end_tokens: Collection[int],
    stop: Stop | None,
) -> Generator[list[int | None], None, None]:
    rows = _Rows(pipeline, prompts, max(room), seeds)
    seen = rows.seen() if sampling.repetition_penalty is not None else None
    alive = {row for row, num_tokens in enumerate(room) if num_tokens}
    with pipeline.holding_weights():
        for step in range(max(room)):
            if not alive:
                return
            rows.look_at_modules()
            # for one token at a time: meanwhile the model is the caller's, who may draw another text by it
            with evaluation_mode(rows.modules), uncompiled(rows.layers):  # each token adds keys
                logits = rows.logits()
            drawn = rows.agreed(None if logits is None else draw(logits, sampling, seen, rows.uniform()))
            tokens: list[int] = drawn.tolist()
            if max(tokens) >= rows.vocab_size:
                raise NonFiniteError("the model gives logits that are NaN, from which no token can be drawn")
            alive = {row for row in alive if tokens[row] not in end_tokens}
            yield [token if row in alive else None for row, token in enumerate(tokens)]
            alive = {row for row in alive if step + 1 < room[row] and not (stop and stop(row, tokens[row]))}
            rows.append(drawn)
            if seen is not None:
                seen.scatter_(1, drawn.unsqueeze(1), True)


class _Rows:
    """The texts in left-padded rows, and the model's way over them.

    Columns [start, end) have not been through the model; what follows them has not been drawn. Memory is taken for
    ``room`` columns, fewer than the texts may come to, and for twice as many when these are full.
    """

    def __init__(
        self, pipeline: Pipeline[GPTModel], prompts: Sequence[Sequence[int]], num_new: int, seeds: Sequence[int]
    ) -> None:
        first = pipeline.chunks[0]
        self.pipeline, self.prompts, self.seeds = pipeline, prompts, seeds
        self.config, self.options = first.config, first.options
        self.device = next(first.parameters()).device
        groups = self.groups = self.options.pg_collection
        assert self.config.vocab_size is not None, "GPTModel has checked it"
        self.vocab_size = self.config.vocab_size
        self.draws = groups.speaks_for_tokens and groups.rank("dp_cp") == 0
        self.start, self.end = 0, max(map(len, prompts))
        self.most = self.end + num_new  # columns
        self.pads = [self.end - len(prompt) for prompt in prompts]
        padded = [[*[0] * pad, *prompt] for pad, prompt in zip(self.pads, prompts, strict=True)]
        self.tokens = torch.tensor(padded, device=self.device)  # [B, room]
        splits = groups.size("cp") > 1 or self.options.sequence_parallel
        self.caches = None if splits else {chunk: chunk.new_caches(self.end) for chunk in pipeline.chunks}
        self.modules, self.layers = _modules_and_layers(pipeline)
        self.parts, self.are_parts_in_place = ForwardParts(self.modules), True
        self.may_replay = _may_replay(pipeline, len(prompts))
        self._make_room(min(self.end + _FIRST_ROOM, self.most))

    def _make_room(self, columns: int) -> None:
        """Takes memory for at least so many ``columns``."""
        B, groups, drawn = len(self.prompts), self.groups, self.tokens[:, : self.end]
        cp, tp = groups.size("cp"), groups.size("tp")
        multiple = lcm(2 * cp if cp > 1 else 1, cp * tp if self.options.sequence_parallel else 1)
        self.room = S = -(-columns // multiple) * multiple
        self.tokens = nn.functional.pad(drawn, (0, S - self.end))  # [B, S]
        self.documents: PackedSeqParams | None = None
        if any(self.pads):
            lengths = [[pad, S - pad] if pad else [S] for pad in self.pads]
            self.documents = PackedSeqParams.from_lengths(lengths).to(self.device)
        positions = torch.arange(S).expand(B, S) - torch.tensor(self.pads).unsqueeze(1)
        longest = _num_positions(self.pipeline.chunks[0])
        self.positions = positions.clamp(0, S if longest is None else longest - 1).to(self.device)  # [B, S]
        self.mine = (torch.arange(S) if cp == 1 else zigzag_positions(S, cp, groups.rank("cp"))).to(self.device)
        # of the tokens that columns [end, S) will get; a column's position in its text is one more than the one before
        self.numbers = uniform_numbers(self.seeds, self.positions[:, self.end - 1 : -1] + 1)  # [B, S - end]
        self.first_number = self.end
        # of one new token in each row; documents, which it holds, are others in other memory
        self.of_one = {chunk: Replayed(self._cached_forward(chunk)) for chunk in self.pipeline.chunks}
        for cache in (cache for caches in (self.caches or {}).values() for cache in caches.values()):
            cache.grow(S)

    def look_at_modules(self) -> None:
        """Before each token: another module, weight or hook, that has been put in since the last one, counts."""
        are_in_place = self.parts.are_in_place()
        if not are_in_place or not self.are_parts_in_place:
            self.modules, self.layers = _modules_and_layers(self.pipeline)
        self.are_parts_in_place = are_in_place

    def uniform(self) -> Tensor:
        """float64 [B]: the numbers that draw the next token of each row."""
        return self.numbers[:, self.end - self.first_number]

    def seen(self) -> Tensor:
        """bool [B, V]: the tokens of each prompt."""
        seen = torch.zeros(len(self.prompts), self.vocab_size, dtype=torch.bool, device=self.device)
        for row, prompt in zip(seen, self.prompts, strict=True):
            row[list(prompt)] = True
        return seen

    def logits(self) -> Tensor | None:
        """Those of the next token of each row, [B, V]; None where this rank does not draw."""
        found: list[Tensor] = []

        def forward(model: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
            assert isinstance(model, GPTModel), "a chunk of the pipeline"
            output = self._whole(model, hidden) if self.caches is None else self._newest(model, hidden)
            if self.pipeline.holds_output(model):
                found.append(output)
            return output

        num_new = len(self.mine) if self.caches is None else self.end - self.start
        shape = hidden_shape(self.config, self.options, len(self.prompts), num_new)
        self.pipeline.evaluate(1, forward, lambda _: shape)
        if not found:
            return None
        last = found[-1][:, -1] if self.caches is not None else self._newest_of(found[-1])
        return last if self.draws else None

    def agreed(self, drawn: Tensor | None) -> Tensor:
        """int64 [B]: what the one rank that draws has ``drawn``, on all ranks."""
        if drawn is None:
            drawn = torch.zeros(len(self.prompts), dtype=torch.int64, device=self.device)
        self.groups.sum_over_model_(drawn)  # of zeros, but for the rank that draws
        return drawn

    def append(self, drawn: Tensor) -> None:
        """Adds a token [B] to each row."""
        self.tokens[:, self.end] = drawn
        self.start, self.end = self.end, self.end + 1
        if self.end == self.room < self.most:
            self._make_room(min(2 * self.room, self.most))

    def _newest(self, model: GPTModel, hidden: Tensor | None) -> Tensor:
        """What ``model`` gives for the newest tokens: logits of the last one, [B, 1, V], or [S, B, H]."""
        new = slice(self.start, self.end)
        given = self.tokens[:, new], self.positions[:, new]
        if self.end - self.start == 1:
            if self.may_replay and self.are_parts_in_place and chosen_by_use() is None:
                return self.of_one[model](*given)
            return self._cached_forward(model)(*given, hidden=hidden)
        # a prompt is read once, which repays no compiler
        with use(chosen_by_use() or ("blocked" if self.device.type == "cpu" else None)):
            return self._cached_forward(model)(*given, hidden=hidden)

    def _cached_forward(self, model: GPTModel) -> Callable[..., Tensor]:
        # it does not hold these rows, which hold it: a reference cycle is freed only when the garbage collector runs
        caches = None if self.caches is None else self.caches[model]
        return partial(_cached_forward, model, self.documents, caches)

    def _whole(self, model: GPTModel, hidden: Tensor | None) -> Tensor:
        """What ``model`` gives for this rank's part of the rows: logits [B, S/cp, V], or [S/cp, B, H]."""
        output: Tensor = model(
            self.tokens[:, self.mine],
            position_ids=self.positions[:, self.mine],
            packed_seq_params=self.documents,
            hidden=hidden,
        )
        return output

    def _newest_of(self, logits: Tensor) -> Tensor:
        """[B, S/cp, V] -> [B, V] after the newest token, which one rank of cp has."""
        return reduce_from_tensor_model_parallel_region(logits[:, self.mine == self.end - 1].sum(dim=1), self.groups.cp)


def _cached_forward(
    model: GPTModel,
    documents: PackedSeqParams | None,
    caches: dict[int, KVCache] | None,
    tokens: Tensor,
    positions: Tensor,
    *,
    hidden: Tensor | None = None,
) -> Tensor:
    """What ``model`` gives for the newest tokens, and keeps in ``caches``."""
    output: Tensor = model(
        tokens,
        position_ids=positions,
        packed_seq_params=documents,
        caches=caches,
        hidden=hidden,
        logits_to_keep=1,
    )
    return output


def _may_replay(pipeline: Pipeline[GPTModel], num_rows: int) -> bool:
    """Whether a forward of one token a row calls nothing but torch, on one CPU.

    It may do more, or not the same at every length: in modules that are neither Megalith's nor torch's, in a matrix
    product of the user's, in MLA, which computes differently with the number of keys, and in hooks.
    """
    model, config = pipeline.chunks[0], pipeline.chunks[0].config
    return (
        model.stage.has_embedding
        and model.stage.has_head
        and config.mla is None
        and model.options.matrix_product in (nn.functional.linear, inference_linear)
        and all(type(module).__module__.startswith(("megalith.", "torch.nn.")) for module in model.modules())
        and not any("forward" in vars(module) for module in model.modules())
        and all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in model.parameters())
        and all(model.options.pg_collection.size(axis) == 1 for axis in ("tp", "cp", "ep", "etp"))
        and num_rows * _widest(config) <= LARGEST_WHOLE  # larger tensors take compiled or hand-written kernels
        and not has_forward_hooks(model)
    )


def _modules_and_layers(pipeline: Pipeline[GPTModel]) -> tuple[list[nn.Module], list[nn.Module]]:
    return pipeline.modules(), [layer for chunk in pipeline.chunks for layer in chunk.layers()]


def _widest(config: TransformerConfig) -> int:
    """How many numbers a token has at most between two operations of a layer."""
    gated = [2 * config.ffn_hidden_size]
    if config.moe is not None:
        gated += [2 * config.moe.top_k * config.expert_ffn_hidden_size, 2 * (config.moe.shared_ffn_hidden_size or 0)]
    return max(config.hidden_size, config.num_attention_heads * config.kv_channels, *gated)


def _num_positions(model: GPTModel) -> int | None:
    """How many tokens a text can have; None: rotary positions do not end."""
    learned = model.config.position_embedding_type == "learned_absolute"
    return model.config.max_position_embeddings if learned else None
