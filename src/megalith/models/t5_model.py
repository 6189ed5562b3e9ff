"""T5: a bidirectional encoder, and a decoder with cross attention to its output.

    e = norm(encoder layers(embed(tokens)));   logits = W norm(decoder layers(embed(decoder tokens), e))

Positions enter as a bias on self-attention scores, from one table per stack that all its layers share; both stacks
share one embedding table. In addition to the usual dropout, T5 drops the MLP's inner features and the output of each
stack's final norm.

Raffel et al. 2019, arXiv:1910.10683. Pipeline stages exchange the hidden states of both stacks as one tensor
[(Se + Sd)/cp/tp, B, H]: encoder layers pass the decoder's embeddings through unchanged, and decoder layers the
encoder's output, so that every stage receives and sends the same shape.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.errors import ShapeError
from megalith.models.language_model import LanguageModel, TokenEmbedder, check_labels, check_mask
from megalith.numerics.dropout import DropoutKey, dropout
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import ColumnParallelLinear
from megalith.transformer.attention import SelfAttention
from megalith.transformer.attention_mask import BIDIRECTIONAL
from megalith.transformer.cross_attention import CrossAttention
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.encoder_output import EncoderOutput, PairedDocuments
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.mlp import MLP
from megalith.transformer.mup import scale_first_weights_
from megalith.transformer.normalization import Normalization
from megalith.transformer.relative_position_bias import RelativePositionBias
from megalith.transformer.stack import LayerStack
from megalith.transformer.stage import Stage

__all__ = ["T5Model"]


class T5Stack(nn.Module):
    """The encoder or decoder layers that a stage holds; indices count from the first layer of that stack.

    Args:
        num_layers: number of layers in the whole stack; the stage with the last one also has the final norm.
        is_decoder: whether attention is causal and layers have cross attention.
    """

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, layers: range, num_layers: int, *, is_decoder: bool
    ) -> None:
        super().__init__()
        spec = LayerSpec(
            attention=partial(SelfAttention, rotates=False),
            feed_forward=partial(MLP, inner_dropout=config.hidden_dropout),
            cross_attention=CrossAttention if is_decoder else None,
        )
        self.context_size = options.pg_collection.size("cp")
        self.embedding_dropout = DropoutSite(config.embedding_dropout)
        self.layers = LayerStack(config, options, layers, lambda index: spec, num_layers)
        self.position_bias: RelativePositionBias | None = None
        if layers:
            assert config.relative_position is not None, "validated together with model.t5"
            self.position_bias = RelativePositionBias(
                config.relative_position,
                config.num_attention_heads,
                options,
                bidirectional=not is_decoder,
                std=config.init_method_std,
            )
        self.begins_here, self.ends_here = (
            bool(layers) and layers.start == 0,
            bool(layers) and layers.stop == num_layers,
        )
        # with post-norm, the last layer already ends in a norm
        has_norm = self.ends_here and config.residual.norm_placement != "post"
        self.norm = Normalization(config, options) if has_norm else None
        self.norm_dropout = DropoutSite(config.hidden_dropout)

    def enter(self, x: Tensor, context: LayerContext) -> Tensor:
        """Returns the first layer's input for embeddings ``x`` [S, B, H]; [S/tp, B, H] under sequence parallelism."""
        return _dropped(x, self.embedding_dropout, context)

    def forward(
        self, x: Tensor, context: LayerContext, num_tokens: int, caches: Mapping[int, KVCache] | None = None
    ) -> Tensor:
        """Applies this stage's layers to ``x``, then the final norm after the last layer; shapes as in ``enter``.

        ``num_tokens``: tokens per row on this rank, S/cp; with ``caches``, by layer, they continue the cached tokens.
        """
        if self.position_bias is None:
            return x
        whole, num_cached = num_tokens * self.context_size, _num_cached(caches)
        bias = self.position_bias(whole, num_cached + whole)
        x = self.layers(x, replace(context, position_bias=bias), caches)
        x = x if self.norm is None else self.norm(x)
        return _dropped(x, self.norm_dropout, context) if self.ends_here else x


class T5Trunk(TokenEmbedder):
    """Both stacks and the embedding table: maps tokens to hidden states, or computes one stage's part of that."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, stage: Stage) -> None:
        super().__init__(config)
        assert config.t5 is not None, "checked by LanguageModel"
        self.stage = stage
        Le, Ld = config.num_layers, config.t5.num_decoder_layers
        of_encoder = range(min(stage.first, Le), min(stage.last, Le))
        of_decoder = range(max(stage.first, Le) - Le, max(stage.last, Le) - Le)
        self.encoder = T5Stack(config, options, of_encoder, Le, is_decoder=False)
        self.decoder = T5Stack(config, options, of_decoder, Ld, is_decoder=True)
        if stage.has_embedding or (stage.has_head and config.tie_word_embeddings):
            self.add_table_(options)

    def all_layers(self) -> list[nn.Module]:
        """Returns the encoder's layers, then the decoder's."""
        return [*self.encoder.layers.values(), *self.decoder.layers.values()]

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor | None,
        contexts: tuple[LayerContext, LayerContext],
        seen: Tensor | None,
        hidden: Tensor | None,
        caches: Mapping[int, KVCache] | None,
    ) -> Tensor:
        """int64 tokens [B, Se], decoder_tokens [B, Sd] -> the head's input, [Sd, B, H].

        Without ``decoder_tokens``, returns the encoder's output [Se, B, H]. A stage without the head returns the hidden
        states of both stacks, [Se + Sd, B, H].

        Args:
            contexts: for the encoder's layers and for the decoder's.
            seen: as in ``EncoderOutput``.
            hidden: [Se + Sd, B, H], the previous stage's output, for a stage without the embedding.
            caches: of this stage's decoder layers. Once they hold the encoder's output, Se is 0.

        Under sequence parallelism each S is S/tp.
        """
        of_encoder, of_decoder = contexts
        Se, Sd = tokens.shape[1], 0 if decoder_tokens is None else decoder_tokens.shape[1]
        x: Tensor
        y: Tensor | None
        if hidden is None:
            x = self.encoder.enter(self.embed(tokens), of_encoder)
            y = None if decoder_tokens is None else self.decoder.enter(self.embed(decoder_tokens), of_decoder)
        else:
            x, y = hidden.tensor_split([len(hidden) * Se // (Se + Sd)])
        x = self.encoder(x, of_encoder, Se) if Se else x
        if y is None:
            return x
        y = self.decoder(y, replace(of_decoder, encoder=EncoderOutput(x, seen)), Sd, caches)
        return y if self.stage.has_head else torch.cat((x, y))


class T5Model(LanguageModel):
    """An encoder of ``config.num_layers`` and a decoder of ``config.t5.num_decoder_layers`` with an output projection.

    Arguments and errors as in ``GPTModel``; layer indices run through both stacks, the encoder first.
    """

    kind = "t5"

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions | None = None,
        *,
        stage: Stage | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__(config, options, stage)
        assert config.vocab_size is not None, "checked by LanguageModel"
        self.model: T5Trunk = T5Trunk(config, self.options, self.stage)
        self.lm_head: ColumnParallelLinear | None = None
        if self.stage.has_head:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                self.options,
                bias=False,
                std=config.init_method_std,
                has_weight=not self.tied,
            )
        scale_first_weights_(self, config)
        self.finish(seed)

    def shared_weights(self) -> list[nn.Parameter]:
        """Returns the embedding, if input and tied head are in different stages, and the tables of split stacks."""
        embedding, shared = self.model.embed_tokens, list[nn.Parameter]()
        if embedding is not None and self.tied and self.stage.has_embedding != self.stage.has_head:
            shared.append(embedding.weight)
        for stack in (self.model.encoder, self.model.decoder):
            if stack.position_bias is not None and not (stack.begins_here and stack.ends_here):
                shared.append(stack.position_bias.weight)
        return shared

    def copied_weights(self) -> list[nn.Parameter]:
        """Returns the shared weights that an earlier stage owns.

        The first stage owns the embedding; the stage with a stack's first layer owns that stack's position table.
        """
        embedding = self.model.embed_tokens
        counted = [] if embedding is None or not self.stage.has_embedding else [embedding.weight]
        for stack in (self.model.encoder, self.model.decoder):
            if stack.position_bias is not None and stack.begins_here:
                counted.append(stack.position_bias.weight)
        return [weight for weight in self.shared_weights() if all(weight is not each for each in counted)]

    def new_caches(self, capacity: int) -> dict[int, KVCache]:
        """Returns an empty cache for each of this stage's decoder layers, by its index in the decoder.

        Each has room for the keys and values of ``capacity`` tokens per decoder row.
        """
        return {int(name): KVCache(capacity) for name in self.model.decoder.layers.names}

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        documents: PairedDocuments | None = None,
        decoder_position_ids: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        caches: Mapping[int, KVCache] | None = None,
        hidden: Tensor | None = None,
        output: Literal["predictions", "hidden"] = "predictions",
    ) -> Tensor:
        """Returns losses if ``labels`` are given, else logits; a stage without the head returns both hidden states.

        Args:
            tokens: int64 [B, Se], the encoder's input.
            decoder_tokens: int64 [B, Sd], the decoder's input; None returns the encoder's output, without a pipeline.
            labels: int64 [B, Sd], the next token for each of the decoder's. A label outside the vocabulary, such as -1
                or -100, has a loss of NaN: label padding with any token, and exclude its losses.
            attention_mask, decoder_attention_mask: bool [B, Se] and [B, Sd], False for padding, which may not lie
                between tokens. By default no padding.
            documents: in place of the masks, which encoder and decoder documents belong together, in whole rows; with
                caches, decoder rows are as long as the caches' capacity.
            decoder_position_ids: int64 [Sd]; by default 0, 1, 2 ...
            dropout_key: as in ``GPTModel``; token ids are int64 [B, Se + Sd], the encoder's followed by the decoder's.
            caches: ``new_caches``; ``decoder_tokens`` continue the cached ones, with ``tokens`` [B, 0] after one call.
            hidden: [Se + Sd, B, H], each S an S/tp under sequence parallelism: the previous stage's output.
            output: what to return for the decoder: the head's predictions, or the hidden states that the head reads.

        Under context parallelism S stands for S/cp: this rank's tokens, those at ``zigzag_positions``.

        Returns:
            The loss of each label, [B, Sd] in float32 or wider; or logits [B, Sd, V], complete on every rank; or hidden
            states: [B, Sd, H] of the decoder, [B, Se, H] of the encoder, or [Se + Sd, B, H] from a stage.

        Raises:
            ShapeError: lengths that sequence parallelism cannot split; masks with documents, caches or split rows;
                documents, masks, labels, token ids or ``hidden`` that do not fit; under cp no ``decoder_position_ids``.
            ConfigError: training with dropout under tensor or context parallelism without a ``dropout_key``.
        """
        self._check_rows(tokens, decoder_tokens, hidden)
        _check_of_decoder(labels, decoder_attention_mask, decoder_tokens)
        self._check_split(is_split=decoder_position_ids is not None)
        documents = self._documents(tokens, decoder_tokens, attention_mask, decoder_attention_mask, documents, caches)
        seen = None
        if documents is not None and decoder_tokens is not None:
            seen = documents.seen(_positions(decoder_tokens, caches, decoder_position_ids))
        contexts = self._contexts(tokens, decoder_tokens, documents, dropout_key)
        x: Tensor = self.model(tokens, decoder_tokens, contexts, seen, hidden, caches)
        if self.lm_head is None:
            return x
        if decoder_tokens is None or output == "hidden":
            return self._whole(x).transpose(0, 1)
        if labels is None:
            return self._gather(self._logits(self.lm_head, x)).transpose(0, 1)  # [B, Sd, V]
        # FSDP2 hooks the outputs of forward, and warns if one is a view
        return self._losses(self.lm_head, x, labels.t()).t().clone()

    def _check_rows(self, tokens: Tensor, decoder_tokens: Tensor | None, hidden: Tensor | None) -> None:
        self._check_shape(tokens, hidden)
        if decoder_tokens is not None:
            self._check_shape(decoder_tokens, hidden)
            if len(decoder_tokens) != len(tokens):
                raise ShapeError(
                    f"decoder_tokens must have as many rows as tokens ({len(tokens)}); got {len(decoder_tokens)}"
                )
            if decoder_tokens.shape[1] == 0:
                raise ShapeError("decoder_tokens must have at least one token; a T5 decoder starts with padding")
        elif not (self.stage.has_embedding and self.stage.has_head):
            raise ShapeError("only a whole model returns the encoder's output; this is a stage; pass decoder_tokens")

    def _documents(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor | None,
        attention_mask: Tensor | None,
        decoder_attention_mask: Tensor | None,
        documents: PairedDocuments | None,
        caches: Mapping[int, KVCache] | None,
    ) -> PairedDocuments | None:
        if attention_mask is None and decoder_attention_mask is None:
            if documents is not None and caches is None:
                self._check_documents(tokens, None, documents.encoder)
                if decoder_tokens is not None:
                    self._check_documents(decoder_tokens, None, documents.decoder)
            return documents
        if documents is not None or caches is not None or self.options.pg_collection.size("cp") > 1:
            raise ShapeError(
                "attention_mask and decoder_attention_mask cannot be combined with documents, caches or context "
                "parallelism; pass only documents, which PairedDocuments.from_padding(attention_mask, "
                "decoder_attention_mask) makes from masks of whole rows"
            )
        rows = tokens if decoder_tokens is None else decoder_tokens
        sides = {"attention_mask": (attention_mask, tokens), "decoder_attention_mask": (decoder_attention_mask, rows)}
        for name, (mask, row) in sides.items():
            check_mask(name, mask, row)
        is_token = [torch.ones_like(row, dtype=torch.bool) if mask is None else mask for mask, row in sides.values()]
        return PairedDocuments.from_padding(*(mask.cpu() for mask in is_token)).to(tokens.device)

    def _contexts(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor | None,
        documents: PairedDocuments | None,
        dropout_key: DropoutKey | None,
    ) -> tuple[LayerContext, LayerContext]:
        """Returns the contexts of the encoder's layers and of the decoder's."""
        rows = [tokens] if decoder_tokens is None else [tokens, decoder_tokens]
        both = torch.cat(rows, dim=1)  # [B, Se + Sd]
        key = self._dropout_key(both, dropout_key) if self.training else None
        if key is not None and key.tokens.shape != both.shape:
            raise ShapeError(
                f"dropout_key must have token ids of shape {list(both.shape)}, the encoder's and then the decoder's; "
                f"got {list(key.tokens.shape)}"
            )
        Se = tokens.shape[1]
        of_encoder = None if key is None else replace(key, tokens=key.tokens[:, :Se])
        of_decoder = None if key is None else replace(key, tokens=key.tokens[:, Se:])
        encoder_rows, decoder_rows = (None, None) if documents is None else (documents.encoder, documents.decoder)
        positions = _positions(tokens)  # only used by rotary tables, which T5 does not have
        return (
            self._context(tokens, positions, encoder_rows, of_encoder, mask=BIDIRECTIONAL),
            self._context(tokens, positions, decoder_rows, of_decoder),
        )


def _dropped(x: Tensor, site: DropoutSite, context: LayerContext) -> Tensor:
    """Applies the dropout of ``site`` to ``x`` [S, B, H]."""
    drops = site.of(context.hidden_dropout_key)
    return x if drops is None or drops.key is None else dropout(x, drops.p, drops.key)


def _num_cached(caches: Mapping[int, KVCache] | None) -> int:
    """Returns the number of decoder tokens in ``caches``; 0 in a stage without decoder layers, where it is unused."""
    return next((cache.num_tokens for cache in caches.values()), 0) if caches else 0


def _positions(tokens: Tensor, caches: Mapping[int, KVCache] | None = None, given: Tensor | None = None) -> Tensor:
    """Returns the positions of tokens [B, S], int64 [S]: ``given``, or by default those after the cached tokens."""
    return _num_cached(caches) + torch.arange(tokens.shape[1], device=tokens.device) if given is None else given


def _check_of_decoder(labels: Tensor | None, decoder_mask: Tensor | None, decoder_tokens: Tensor | None) -> None:
    if decoder_tokens is not None:
        check_labels(labels, decoder_tokens)
    elif labels is not None or decoder_mask is not None:
        raise ShapeError("labels and decoder_attention_mask need decoder_tokens; pass it, or leave both out")
