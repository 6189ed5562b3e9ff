"""GPT: a causal decoder with the architecture of Llama, GPT-2, or any mix of their parts; all of it or one stage."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.errors import ShapeError
from megalith.models.language_model import LanguageModel, Trunk
from megalith.models.multi_token_prediction import MultiTokenPrediction
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import ColumnParallelLinear
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import LayerSpecs, layer_specs
from megalith.transformer.mup import scale_first_weights_
from megalith.transformer.stage import Stage
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["GPTModel"]


class GPTDecoder(Trunk):
    """The trunk of a GPT; its layers include the multi-token prediction modules."""

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, stage: Stage, spec_of: LayerSpecs | None
    ) -> None:
        spec_of = spec_of or layer_specs(config)
        num_ahead = config.mtp.num_modules if config.mtp is not None and stage.has_head else 0
        reads_out = stage.has_head and (config.tie_word_embeddings or num_ahead > 0)
        super().__init__(config, options, stage, spec_of, has_table=stage.has_embedding or reads_out)
        self.ahead = [str(config.num_layers + depth) for depth in range(num_ahead)]
        for name in self.ahead:
            self.layers[name] = MultiTokenPrediction(config, options, spec_of(int(name)))

    def predict_ahead(self, x: Tensor, tokens: Tensor, context: LayerContext) -> Iterator[Tensor]:
        """Yields ``x``, the head's input, then the head's input at each multi-token prediction depth; [S, B, H] each.

        ``tokens`` are int64 [M, B, S], those 1, 2 ... M ahead of each position. They are embedded without positions
        and dropout, which ``x`` already contains.
        """
        yield x
        for name, ahead in zip(self.ahead, tokens, strict=True):
            x = self.layers[name](self.embed(ahead), x, context)
            yield x


class GPTModel(LanguageModel):
    """A causal language model.

    Args:
        config: the architecture; ``vocab_size`` must be set.
        options: process groups, dtype, strategies; by default a single process without torch.distributed.
        stage: the part of the model to build; by default all of it.
        spec_of: returns the spec of the layer with a given index; by default the one that ``config`` describes.
        seed: of the initial weights; under ``torch.device("meta")`` none are drawn, see ``materialize``.

    Raises:
        ConfigError: as in ``LanguageModel``.
        ShapeError: sizes that cannot be split over tp.
    """

    kind = "gpt"

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions | None = None,
        *,
        stage: Stage | None = None,
        spec_of: LayerSpecs | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__(config, options, stage)
        assert config.vocab_size is not None, "checked by LanguageModel"
        self.model: GPTDecoder = GPTDecoder(config, self.options, self.stage, spec_of)
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
        """Returns the embedding, if one stage embeds tokens and another uses it as tied head or to predict ahead."""
        embedding = self.model.embed_tokens
        shared = self.stage.has_embedding != self.stage.has_head and (self.tied or self.config.mtp is not None)
        return [embedding.weight] if shared and embedding is not None else []

    def new_caches(self, capacity: int) -> dict[int, KVCache]:
        """Returns an empty key-value cache for each layer of this stage, with room for ``capacity`` tokens per row."""
        return {index: KVCache(capacity) for index in self.stage.layers}

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout_key: DropoutKey | None = None,
        caches: Mapping[int, KVCache] | None = None,
        hidden: Tensor | None = None,
        logits_to_keep: int | None = None,
        record: MicroBatchRecord | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns losses if ``labels`` are given, else logits; a stage without the head returns hidden states.

        Args:
            tokens: int64 [B, S]; under cp, S stands for S/cp: this rank's tokens, those at ``zigzag_positions``.
            labels: int64 [B, S], the next tokens; or [1+M, B, S], those 1, 2 ... 1+M ahead, any ids past a row's end.
            position_ids: int64 [S] or [B, S]; by default 0, 1, 2 ..., continuing after cached tokens. With
                ``rope.sections`` also [3, B, S]: time, height and width.
            packed_seq_params: document boundaries, in whole rows; tokens attend only to their own document. With
                caches, rows are as long as the caches' capacity.
            dropout_key: the key of the step, with the global id of each token, int64 [B, S]. Without tensor or context
                parallelism it may be omitted, and is then drawn from torch's generator.
            caches: one per layer, by its index; ``tokens`` then continue the cached ones.
            hidden: [S, B, H], [S/tp, B, H] under sequence parallelism: the previous stage's output.
            logits_to_keep: compute logits for this many last positions only; by default for all.
            record: the training step's record, which routers read and write.
            padding_mask: bool [B, S], True for real tokens, for routers: they do not count padding or give it capacity.

        Returns:
            The loss of each label, [B, S] or [1+M, B, S] in float32 or wider; or logits [B, S, V], complete on every
            rank; or hidden states [S, B, H].

        Raises:
            ShapeError: more positions than ``max_position_embeddings``, unless ``position_ids`` are given per row;
                [3, B, S] without ``rope.sections``; an S that sequence parallelism cannot split; documents of other
                rows; labels for other depths; ``hidden`` that does not fit the stage; more tokens than the caches have
                room for; under cp, missing ``position_ids``, or caches; ``logits_to_keep`` for split rows.
            ConfigError: training with dropout under tensor or context parallelism without a ``dropout_key``.
        """
        cache = next(iter(caches.values())) if caches else None
        num_cached = cache.num_tokens if cache else 0
        self._check_shape(tokens, hidden)
        self._check_documents(tokens, cache, packed_seq_params)
        self._check_labels(labels)
        cp_size = self._check_split(is_split=caches is None and position_ids is not None)
        if position_ids is None:
            position_ids = torch.arange(num_cached, num_cached + tokens.shape[1], device=tokens.device)
        self._check_positions(position_ids, num_cached + tokens.shape[1] * cp_size)
        context = self._context(tokens, position_ids, packed_seq_params, dropout_key, record, is_token=padding_mask)
        x: Tensor = self.model(tokens, position_ids, context, caches, hidden)
        if self.lm_head is None:
            return x
        if labels is None:
            x = self._last(x, logits_to_keep)
            return self._gather(self._logits(self.lm_head, x)).transpose(0, 1)  # [B, S, V]
        # FSDP2 hooks the outputs of forward, and warns if one is a view
        return self._losses_ahead(self.lm_head, x, labels, context).clone()

    def _losses_ahead(self, head: ColumnParallelLinear, x: Tensor, labels: Tensor, context: LayerContext) -> Tensor:
        """Losses, [B, S] or [1+M, B, S] like ``labels``."""
        if labels.dim() == 2:
            return self._losses(head, x, labels.t()).t()
        states = self.model.predict_ahead(x, labels[:-1], context)
        return torch.stack([self._losses(head, read, each.t()).t() for read, each in zip(states, labels, strict=True)])

    def _last(self, x: Tensor, num_positions: int | None) -> Tensor:
        """[S, B, H] -> [num_positions, B, H], by default all. Raises ShapeError if rows are split over ranks."""
        if num_positions is None:
            return x
        if self.options.sequence_parallel or self.options.pg_collection.size("cp") > 1:
            raise ShapeError(
                "logits_to_keep is not supported with sequence or context parallelism, where not every rank holds the "
                "last positions; leave it out to get all logits"
            )
        return x[-num_positions:]

    def _check_labels(self, labels: Tensor | None) -> None:
        num_labels = 1 + (0 if self.config.mtp is None else self.config.mtp.num_modules)
        if labels is not None and labels.dim() == 3 and len(labels) != num_labels:
            raise ShapeError(
                f"labels [1+M, B, S] must have {num_labels} entries in dimension 0, one for each token that the model "
                f"predicts per position; got {len(labels)}"
            )
