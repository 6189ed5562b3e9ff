"""Autoregressive generation with a causal language model, for a batch of prompts of any lengths, in any layout.

Prompts are left-padded, so that the newest tokens of all rows are in one column. Each row consists of two documents,
its padding and its text, and positions count from the start of the text. A text is therefore the same, up to rounding,
alone and in any batch. Keys and values are cached unless sequence or context parallelism splits the rows: a single new
token cannot be split, so each token then takes a forward over the whole text so far.

One rank samples the tokens and sends them to the others; otherwise rounding could make ranks disagree on where a text
ends.
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
from megalith.parallel.linear import is_plain
from megalith.parallel.pipeline.pipeline import Pipeline, evaluation_mode
from megalith.topology.collectives import reduce_from_tensor_model_parallel_region
from megalith.torch_compat.compiler import uncompiled
from megalith.torch_compat.modules import ForwardParts, has_forward_hooks
from megalith.transformer.layer_context import FIRST_ROOM, KVCache

__all__ = ["Stop", "check_length", "check_prompt_length", "check_tokens", "generate", "stream"]

# (row, its newest token) -> whether the text ends with that token
Stop = Callable[[int, int], bool]


def check_length(max_new_tokens: int) -> None:
    """Raises ConfigError if the number of new tokens is negative."""
    if max_new_tokens < 0:
        raise ConfigError(f"the number of new tokens must be 0 or more; got {max_new_tokens}; use 128")


def check_prompt_length(num_tokens: int, num_positions: int | None) -> None:
    """Raises ConfigError if a prompt is empty or fills all ``num_positions``; None means that there is no limit."""
    if not num_tokens:
        raise ConfigError("the prompt has no tokens; provide some text to continue")
    if num_positions is not None and num_tokens >= num_positions:
        raise ConfigError(
            f"the prompt must be shorter than the model's {num_positions} positions; got {num_tokens}; shorten it"
        )


def check_tokens(prompts: Sequence[Sequence[int]], vocab_size: int | None) -> None:
    """Raises ConfigError for a token id that the model has no row for."""
    for number, prompt in enumerate(prompts):
        for token in prompt:
            if vocab_size is not None and not 0 <= token < vocab_size:
                raise ConfigError(
                    f"token ids must be from 0 to {vocab_size - 1}; prompt {number} has {token}; encode it with the "
                    "tokenizer of the model"
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
    """Returns up to ``max_new_tokens`` tokens after each of ``prompts``, stopping before one of ``end_tokens``.

    A text also ends when learned positions run out. The same seed gives the same text on one device type, alone and in
    any batch, up to rounding of the logits, unless experts have a capacity, for which texts compete, also those that
    have ended. All ranks of the model must call this together, with the same arguments.

    Args:
        seeds: one random seed per text; by default 0, 1, 2 ...
        stop: called on every rank after each token of a row; if it returns True, the text ends with that token.

    Raises:
        ConfigError: there are no prompts, or one is empty, fills all learned positions, or has a token outside of the
            vocabulary; the number of seeds differs; the number of tokens or a seed is out of range.
        NonFiniteError: no token can be sampled, because logits are NaN.
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
    """Yields the tokens of ``generate`` as they are sampled, one per text; None for a text that has ended.

    Raises the same errors; ConfigError is raised by the call itself. The model is in evaluation mode while a token is
    sampled, and in its own mode between tokens. Between tokens, weights, hooks and modules may be replaced, with effect
    from the next token on, but not the number of layers, weights sharded by FSDP, or weights shared by pipeline stages.
    Changes to a module's plain attributes or methods after the first tokens may be ignored.
    """
    check_length(max_new_tokens)
    seeds = range(len(prompts)) if seeds is None else seeds
    if not prompts or len(seeds) != len(prompts):
        raise ConfigError(
            f"generation needs at least one prompt, and one seed per prompt; got {len(prompts)} prompts and "
            f"{len(seeds)} seeds"
        )
    for seed in seeds:
        check_seed(seed)
    pipeline = model if isinstance(model, Pipeline) else Pipeline([model])
    check_tokens(prompts, pipeline.chunks[0].config.vocab_size)
    num_positions = pipeline.chunks[0].config.longest_text
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
            # entered anew for each token: between tokens the caller may use the model, even to generate another text
            with evaluation_mode(rows.modules), uncompiled(rows.layers):  # each token adds keys
                logits = rows.logits()
            drawn = rows.agreed(None if logits is None else draw(logits, sampling, seen, rows.uniform()))
            tokens: list[int] = drawn.tolist()
            if max(tokens) >= rows.vocab_size:
                raise NonFiniteError("the model's logits contain NaN, so no token can be sampled")
            alive = {row for row in alive if tokens[row] not in end_tokens}
            yield [token if row in alive else None for row, token in enumerate(tokens)]
            alive = {row for row in alive if step + 1 < room[row] and not (stop and stop(row, tokens[row]))}
            rows.append(drawn)
            if seen is not None:
                seen.scatter_(1, drawn.unsqueeze(1), True)


class _Rows:
    """The texts as left-padded rows, and the forwards of the model over them.

    Columns [start, end) have not been through the model yet; later columns have not been sampled. Memory is allocated
    for ``room`` columns, which may be fewer than the texts will need, and doubles when these are full.
    """

    def __init__(
        self, pipeline: Pipeline[GPTModel], prompts: Sequence[Sequence[int]], num_new: int, seeds: Sequence[int]
    ) -> None:
        first = pipeline.chunks[0]
        self.pipeline, self.prompts, self.seeds = pipeline, prompts, seeds
        self.config, self.options = first.config, first.options
        self.device = next(first.parameters()).device
        groups = self.groups = self.options.pg_collection
        assert self.config.vocab_size is not None, "checked by GPTModel"
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
        self._make_room(min(self.end + FIRST_ROOM, self.most))

    def _make_room(self, columns: int) -> None:
        """Allocates memory for at least ``columns`` columns."""
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
        longest = self.pipeline.chunks[0].config.longest_text
        self.positions = positions.clamp(0, S if longest is None else longest - 1).to(self.device)  # [B, S]
        self.mine = zigzag_positions(S, cp, groups.rank("cp"), self.device)
        # for the tokens of columns [end, S); each column's position in its text is one more than the previous column's
        self.numbers = uniform_numbers(self.seeds, self.positions[:, self.end - 1 : -1] + 1)  # [B, S - end]
        self.first_number = self.end
        # for one new token per row; made again here because it holds the documents, which were replaced
        self.of_one = {chunk: Replayed(self._cached_forward(chunk)) for chunk in self.pipeline.chunks}
        for cache in (cache for caches in (self.caches or {}).values() for cache in caches.values()):
            cache.grow(S)

    def look_at_modules(self) -> None:
        """Picks up modules, weights and hooks that were replaced since the last token; called before each token."""
        are_in_place = self.parts.are_in_place()
        if not are_in_place or not self.are_parts_in_place:
            self.modules, self.layers = _modules_and_layers(self.pipeline)
        self.are_parts_in_place = are_in_place

    def uniform(self) -> Tensor:
        """Returns the random numbers that sample the next token of each row, float64 [B]."""
        return self.numbers[:, self.end - self.first_number]

    def seen(self) -> Tensor:
        """Returns which tokens occur in each prompt, bool [B, V]."""
        seen = torch.zeros(len(self.prompts), self.vocab_size, dtype=torch.bool, device=self.device)
        for row, prompt in zip(seen, self.prompts, strict=True):
            row[list(prompt)] = True
        return seen

    def logits(self) -> Tensor | None:
        """Returns the logits of each row's next token, [B, V]; None if this rank does not sample."""
        found: list[Tensor] = []

        def forward(model: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
            assert isinstance(model, GPTModel), "the chunks of the pipeline must be GPTModels"
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
        """Returns the sampling rank's ``drawn`` tokens on all ranks, int64 [B]."""
        if drawn is None:
            drawn = torch.zeros(len(self.prompts), dtype=torch.int64, device=self.device)
        self.groups.sum_over_model_(drawn)  # zeros on all ranks but the one that samples
        return drawn

    def append(self, drawn: Tensor) -> None:
        """Appends one token to each row; ``drawn`` is [B]."""
        self.tokens[:, self.end] = drawn
        self.start, self.end = self.end, self.end + 1
        if self.end == self.room < self.most:
            self._make_room(min(2 * self.room, self.most))

    def _newest(self, model: GPTModel, hidden: Tensor | None) -> Tensor:
        """Runs ``model`` on the newest tokens; returns the last one's logits, [B, 1, V], or hidden states [S, B, H]."""
        new = slice(self.start, self.end)
        given = self.tokens[:, new], self.positions[:, new]
        if self.end - self.start == 1:
            if self.may_replay and self.are_parts_in_place and chosen_by_use() is None:
                return self.of_one[model](*given)
            return self._cached_forward(model)(*given, hidden=hidden)
        # a prompt is processed only once, which does not repay compilation
        with use(chosen_by_use() or ("blocked" if self.device.type == "cpu" else None)):
            return self._cached_forward(model)(*given, self._are_tokens(new), hidden=hidden)

    def _are_tokens(self, columns: slice | Tensor) -> Tensor | None:
        """Returns which ``columns`` of each row hold a token, bool [B, columns], for experts; None without any."""
        if self.config.moe is None:
            return None
        numbers = torch.arange(self.room, device=self.device)[columns]
        return (numbers >= torch.tensor(self.pads, device=self.device).unsqueeze(1)) & (numbers < self.end)

    def _cached_forward(self, model: GPTModel) -> Callable[..., Tensor]:
        # must not reference self, which holds it: reference cycles are freed only when the garbage collector runs
        caches = None if self.caches is None else self.caches[model]
        return partial(_cached_forward, model, self.documents, caches)

    def _whole(self, model: GPTModel, hidden: Tensor | None) -> Tensor:
        """Runs ``model`` on this rank's part of the rows; returns logits [B, S/cp, V] or hidden states [S/cp, B, H]."""
        output: Tensor = model(
            self.tokens[:, self.mine],
            position_ids=self.positions[:, self.mine],
            packed_seq_params=self.documents,
            hidden=hidden,
            padding_mask=self._are_tokens(self.mine),
        )
        return output

    def _newest_of(self, logits: Tensor) -> Tensor:
        """[B, S/cp, V] -> [B, V] at the newest token, which is on one rank of cp."""
        return reduce_from_tensor_model_parallel_region(logits[:, self.mine == self.end - 1].sum(dim=1), self.groups.cp)


def _cached_forward(
    model: GPTModel,
    documents: PackedSeqParams | None,
    caches: dict[int, KVCache] | None,
    tokens: Tensor,
    positions: Tensor,
    is_token: Tensor | None = None,
    *,
    hidden: Tensor | None = None,
) -> Tensor:
    """Runs ``model`` on the newest tokens, and adds their keys and values to ``caches``."""
    output: Tensor = model(
        tokens,
        position_ids=positions,
        packed_seq_params=documents,
        caches=caches,
        hidden=hidden,
        logits_to_keep=1,
        padding_mask=is_token,
    )
    return output


def _may_replay(pipeline: Pipeline[GPTModel], num_rows: int) -> bool:
    """Whether a forward of one token per row only calls torch functions, on one CPU, so that it can be replayed.

    Excluded is what may do more, or depend on the length: modules from outside Megalith and torch, a custom matrix
    product, MLA (its computation depends on the number of keys), and hooks.
    """
    model, config = pipeline.chunks[0], pipeline.chunks[0].config
    return (
        model.stage.has_embedding
        and model.stage.has_head
        and config.mla is None
        and (is_plain(model.options.matrix_product) or model.options.matrix_product is inference_linear)
        and model.options.layer_product is None
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
    """Returns the largest number of values per token between two operations of a layer."""
    gated = [2 * config.ffn_hidden_size]
    if config.moe is not None:
        gated += [2 * config.moe.top_k * config.expert_ffn_hidden_size, 2 * (config.moe.shared_ffn_hidden_size or 0)]
    return max(config.hidden_size, config.num_attention_heads * config.kv_channels, *gated)
