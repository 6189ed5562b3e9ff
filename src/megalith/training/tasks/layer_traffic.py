"""Counts what a model's layers exchange per micro-batch, and lists their weights; X is [S/cp, B, H] in bytes.

    embedding         leaves tensor parallelism                                                    1 X
    self-attention    enters and leaves tensor parallelism; between q, k, v and o, attention over context    2 X
    cross attention   enters, as does the encoder output, and leaves; keys and values are gathered over context
    feed-forward      enters and leaves                                                            2 X

With sequence parallelism, each X is exchanged in forward and backward: an all-gather in one, a reduce-scatter in the
other. Without it, there is one all-reduce: in forward for what leaves, in backward for what enters. Recomputation
repeats the forward of layers, or of the modules that a run names, as far as the backward needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megalith.config import MLAConfig, RunConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.models.language_model import hidden_dtype
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.context.traffic import attention_traffic
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.regions import enter_traffic, leave_traffic
from megalith.parallel.traffic import Passes, Traffic, collective
from megalith.training.build_model import DTYPES

__all__ = ["Block", "LayerTraffic", "embedding_weight", "layer_weights", "norm_weights", "position_weights"]


@dataclass(frozen=True)
class Block:
    """A part of a layer; ``enter`` may be recomputed together with the norm before it."""

    enter: Passes
    core: Passes
    leave: Passes

    @property
    def whole(self) -> Passes:
        return self.enter + self.core + self.leave


@dataclass(frozen=True)
class LayerTraffic:
    """Counts the traffic of a run's layers under ``layout``; S stands for S/cp, the tokens that a rank has of a row."""

    config: RunConfig
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return DTYPES[self.config.precision.dtype]

    def num_tokens(self, S: int) -> int:
        """Returns the tokens of a micro-batch."""
        return S * self.config.train.micro_batch_size

    def enter(self, S: int, width: int | None = None) -> Passes:
        """Counts the entry of [S, B, H], or of ``width`` features, into tensor parallelism."""
        return enter_traffic(self._bytes(S, width), self.layout.tensor, self.config.parallel.sequence)

    def leave(self, S: int) -> Passes:
        """Counts the exit of [S, B, H] from tensor parallelism."""
        return leave_traffic(self._bytes(S, None), self.layout.tensor, self.config.parallel.sequence)

    def hidden_bytes(self, S: int) -> int:
        """Returns the bytes of the hidden states of S tokens that stages send each other."""
        model = self.config.model
        num_bytes = self.num_tokens(S) * model.hidden_size * hidden_dtype(model, self.dtype).itemsize
        return num_bytes // self.layout.tensor if self.config.parallel.sequence else num_bytes

    def self_attention(self, S: int) -> Block:
        """Counts self-attention over S tokens."""
        model, parallel = self.config.model, self.config.parallel
        B, D, enter = self.config.train.micro_batch_size, model.kv_channels, self.enter(S)
        if model.mla is not None:  # queries, then keys and values
            read = model.hidden_size if model.mla.q_lora_rank is None else model.mla.q_lora_rank
            enter = self.enter(S, read) + self.enter(S, model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
        core = attention_traffic(
            (S, B, model.num_attention_heads // self.layout.tensor, D),
            (S, B, max(model.num_query_groups // self.layout.tensor, 1), D),
            D if model.mla is None else model.mla.v_head_dim,
            self.dtype,
            ContextMethod(parallel.context_method, parallel.context_inner or 1),
            self.layout.context,
            drops=model.attention_dropout > 0.0,
        )
        return Block(enter, core, self.leave(S))

    def cross_attention(self, S: int, Se: int) -> Block:
        """Counts cross attention of S decoder tokens over Se encoder tokens."""
        model, cp = self.config.model, self.layout.context
        heads = model.num_attention_heads // self.layout.tensor * model.kv_channels
        whole_rows = cp * self.num_tokens(Se) * heads * self.dtype.itemsize
        keys_and_values = Passes(
            collective("context", "all_gather", whole_rows, cp, times=2),
            collective("context", "reduce_scatter", whole_rows, cp, times=2),
        )
        return Block(self.enter(S), self.enter(Se) + keys_and_values, self.leave(S))

    def feed_forward(self, S: int) -> Block:
        """Counts a feed-forward block over S tokens."""
        return Block(self.enter(S), Passes(), self.leave(S))

    def layer(self, blocks: Mapping[str, Block], *, in_module: bool = False) -> Traffic:
        """Counts a layer without experts: forward, backward, and recomputation.

        ``blocks``: its parts in order, by their names in ``train.recompute_modules``; ``in_module``: it belongs to a
        multi-token prediction module, which continues after it.
        """
        whole = sum((block.whole for block in blocks.values()), start=Passes())
        found, train, model = whole.forward + whole.backward, self.config.train, self.config.model
        if train.recompute == "full":
            # dropout at the layer's end saves its mask, and a norm there or after it saves its input
            norm_follows = in_module or model.residual.norm_placement != "pre"
            saves_last = model.hidden_dropout > 0.0 or norm_follows
            return found + (whole.forward if saves_last else whole.recomputed)
        names = train.recompute_modules if train.recompute == "selective" else ()
        if "core_attn" in names:
            found += blocks["self_attn"].core.recomputed
        for name, block in blocks.items():
            if name in names:
                found += block.whole.recomputed
            elif "layernorm" in names:
                found += block.enter.forward  # the norm's output is kept before the all-gather, or not at all
        return found

    def _bytes(self, S: int, width: int | None) -> int:
        return self.num_tokens(S) * (width or self.config.model.hidden_size) * self.dtype.itemsize


def norm_weights(model: TransformerConfig, partial: bool, size: int | None = None) -> list[Weight]:
    """Lists the weights of a norm of ``size`` features, by default the hidden size."""
    weight = Weight((model.hidden_size if size is None else size,), partial=partial)
    return [weight] * (2 if model.normalization == "LayerNorm" else 1)


def embedding_weight(model: TransformerConfig) -> Weight:
    """Returns the word embedding table; an output projection has the same shape."""
    assert model.vocab_size is not None, "set by preflight"
    return Weight((model.vocab_size, model.hidden_size), split=0)


def position_weights(model: TransformerConfig, sequence: bool) -> list[Weight]:
    """Lists the table of learned positions, if the model has one."""
    if model.position_embedding_type != "learned_absolute":
        return []
    assert model.max_position_embeddings is not None, "always set with learned positions"
    return [Weight((model.position_offset + model.max_position_embeddings, model.hidden_size), partial=sequence)]


def layer_weights(
    model: TransformerConfig,
    tp_size: int,
    sequence: bool,
    *,
    feed_forward: list[Weight] | None = None,
    has_cross_attention: bool = False,
) -> list[Weight]:
    """Lists the weights of a layer; ``feed_forward``: those of its feed-forward part if that is not a plain MLP.

    Weights that tp ranks apply to their own tokens, or to their own heads, have partial gradients.
    """
    mlp = _mlp_weights(model, sequence) if feed_forward is None else feed_forward
    attention = _attention_weights(model, tp_size) if model.mla is None else _latent_weights(model, model.mla, sequence)
    output_bias = [Weight((model.hidden_size,), partial=sequence)] * model.output_bias
    attention += output_bias
    num_parts = 2
    if has_cross_attention:
        attention += [*_cross_attention_weights(model), *output_bias]
        num_parts = 3
    num_norms = 2 * num_parts if model.residual.norm_placement == "sandwich" else num_parts
    return [*attention, *mlp, *norm_weights(model, sequence) * num_norms]


def _mlp_weights(model: TransformerConfig, sequence: bool) -> list[Weight]:
    H, F = model.hidden_size, model.ffn_hidden_size
    fc1 = [Weight((F, H), split=0)] * (1 if model.gate_activation is None else 2)
    biases = [Weight((F,), split=0)] * len(fc1) if model.mlp_bias else []
    return [*fc1, Weight((H, F), split=1), *biases, *[Weight((H,), partial=sequence)] * model.mlp_bias]


def _attention_weights(model: TransformerConfig, tp_size: int) -> list[Weight]:
    """Lists the attention weights of a layer, except the output bias."""
    H, A, G, D = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.kv_channels
    heads_are_shared = G % tp_size != 0
    key = Weight((G * D, H), split=None if heads_are_shared else 0, partial=heads_are_shared)
    reads_queries = 2 if model.attention.output_gate else 1
    qkv = [*[Weight((A * D, H), split=0)] * reads_queries, key, key]
    biases = [Weight(column.shape[:1], column.split, column.partial) for column in qkv] if model.qkv_bias else []
    return [*qkv, Weight((H, A * D), split=1), *biases, *_of_heads(model)]


def _cross_attention_weights(model: TransformerConfig) -> list[Weight]:
    """Like ``_attention_weights``, with separate keys for every head."""
    width, H = model.num_attention_heads * model.kv_channels, model.hidden_size
    biases = [Weight((width,), split=0)] * 3 if model.qkv_bias else []
    return [*[Weight((width, H), split=0)] * 3, Weight((H, width), split=1), *biases]


def _latent_weights(model: TransformerConfig, mla: MLAConfig, sequence: bool) -> list[Weight]:
    """``_attention_weights`` of latent attention: every tp rank has the whole down-projections."""
    H, A, D = model.hidden_size, model.num_attention_heads, model.kv_channels
    heads = [
        Weight((A * D, mla.q_lora_rank or H), split=0),
        Weight((A * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank), split=0),
        Weight((H, A * mla.v_head_dim), split=1),
    ]
    latents = [(mla.kv_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim)]
    if mla.q_lora_rank is not None:
        latents.append((mla.q_lora_rank, mla.q_lora_rank))
    whole: list[Weight] = []
    for size, width in latents:
        whole += [Weight((width, H), partial=sequence)]
        whole += [Weight((width,), partial=sequence)] * model.qkv_bias
        whole += norm_weights(model, sequence, size)
    return [*heads, *whole]


def _of_heads(model: TransformerConfig) -> list[Weight]:
    """Lists norms of queries and keys, which tp ranks apply to their own heads, and learned sinks."""
    norms = [Weight((model.kv_channels,), partial=True)] * (2 * len(model.attention.norm_parameters))
    sinks = [Weight((model.num_attention_heads,), split=0)] if model.attention.softmax == "learnable" else []
    return [*norms, *sinks]
