"""GPT: a causal decoder of Llama shape, GPT-2 shape, or any mix of their parts; the whole of it, or one stage.

Parameter names are those of Hugging Face's Llama in every shape (``model.layers.0.self_attn.q_proj.weight``);
``models/hf`` renames them for architectures that call them otherwise.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.models.multi_token_prediction import MultiTokenPrediction
from megalith.numerics.dropout import DropoutKey, dropout
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.parameters import local
from megalith.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megalith.parallel.tensor.layers import ColumnParallelLinear, VocabParallelEmbedding
from megalith.topology.collectives import gather_from_tensor_model_parallel_region
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.dropout import DropoutSite, sequence_parallel_key
from megalith.transformer.embeddings import LearnedPositions
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import LayerSpecs, layer_specs
from megalith.transformer.module import ModelModule
from megalith.transformer.mup import scale_first_weights_
from megalith.transformer.normalization import Normalization
from megalith.transformer.rotary import rotary_tables
from megalith.transformer.stack import LayerStack
from megalith.transformer.stage import Stage
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["GPTModel", "hidden_dtype", "hidden_shape"]


class GPTDecoder(nn.Module):
    """Embeddings, layers, final norm: tokens to hidden states, or the part of that way that a stage has."""

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, stage: Stage, spec_of: LayerSpecs | None
    ) -> None:
        super().__init__()
        assert config.vocab_size is not None, "GPTModel has checked it"
        learned = config.position_embedding_type == "learned_absolute"
        spec_of = spec_of or layer_specs(config)
        self.stage = stage
        self.layers = LayerStack(config, options, stage.layers, spec_of)
        # the last layer of post-norm ends in a norm of its own
        has_norm = stage.has_head and config.residual.norm_placement != "post"
        self.norm = Normalization(config, options) if has_norm else None
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.embed_positions: LearnedPositions | None = None
        num_ahead = config.mtp.num_modules if config.mtp is not None and stage.has_head else 0
        self.ahead = [str(config.num_layers + depth) for depth in range(num_ahead)]
        for name in self.ahead:
            self.layers[name] = MultiTokenPrediction(config, options, spec_of(int(name)))
        if stage.has_embedding or (stage.has_head and (config.tie_word_embeddings or num_ahead)):
            std = config.init_method_std
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options, std=std)
        if stage.has_embedding and learned:
            self.embed_positions = LearnedPositions(config, options)
        self.embedding_dropout = DropoutSite(config.embedding_dropout)
        self.config = config

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        context: LayerContext,
        caches: Mapping[int, KVCache] | None,
        hidden: Tensor | None,
    ) -> Tensor:
        """int64 tokens [B, S], position_ids [S] or [B, S] -> [S, B, H]; [S/tp, B, H] under sequence parallelism.

        ``hidden`` has that shape too: what the stage before gave, for a stage without the embedding.
        """
        if self.stage.has_embedding:
            hidden = self._begin(tokens, position_ids, context)
        x: Tensor = self.layers(hidden, context, caches)
        return x if self.norm is None else self.norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """The vectors of ``tokens``, times their factor, in the dtype of the residual stream; shapes as ``forward``."""
        assert self.embed_tokens is not None, "built in this stage"
        x: Tensor = self.embed_tokens(tokens)  # [S, B, H]
        x, multiplier = x.to(hidden_dtype(self.config, x.dtype)), self.config.multipliers.embedding
        return x if multiplier == 1.0 else x * multiplier

    def _begin(self, tokens: Tensor, position_ids: Tensor, context: LayerContext) -> Tensor:
        x = self.embed(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        drops = self.embedding_dropout.of(context.hidden_dropout_key)
        return x if drops is None or drops.key is None else dropout(x, drops.p, drops.key)

    def predict_ahead(self, x: Tensor, tokens: Tensor, context: LayerContext) -> Iterator[Tensor]:
        """``x``, what the head reads, then what it reads at each depth of multi-token prediction; [S, B, H] each.

        ``tokens`` are int64 [M, B, S], those 1, 2 ... M ahead of each position. They are embedded without positions
        and without dropout, which are in ``x``.
        """
        yield x
        for name, ahead in zip(self.ahead, tokens, strict=True):
            x = self.layers[name](self.embed(ahead), x, context)
            yield x


class GPTModel(ModelModule):
    """A causal language model.

    Args:
        config: the shape; ``vocab_size`` must be set.
        options: groups, dtype, strategies; by default one process, with no torch.distributed.
        stage: which part of the model to build; by default all of it.
        spec_of: what each layer is built from, by its index; by default what ``config`` asks for.
        seed: of the first weights; built under ``torch.device("meta")`` none are drawn, see ``materialize``.

    Raises:
        ConfigError: the vocabulary's size is not known, the stage is not one of this model, or it asks for a T5.
        ShapeError: sizes that tp cannot split.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions | None = None,
        *,
        stage: Stage | None = None,
        spec_of: LayerSpecs | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size is not set; give it, or name a tokenizer in data.tokenizer")
        if config.t5 is not None:
            raise ConfigError("a GPT is one causal stack, and model.t5 asks for an encoder and a decoder; leave it out")
        options = options or BuildOptions(ProcessGroupCollection.single())
        self.stage = stage or Stage.whole(config.num_layers)
        self.stage.check_fits(config.num_layers)
        self.tied = config.tie_word_embeddings
        self.config = config
        self.options = options
        self.model = GPTDecoder(config, options, self.stage, spec_of)
        self.lm_head: ColumnParallelLinear | None = None
        if self.stage.has_head:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                options,
                bias=False,
                std=config.init_method_std,
                has_weight=not self.tied,
            )
        scale_first_weights_(self, config)
        self.finish(seed)

    def layers(self) -> list[nn.Module]:
        """The transformer layers of this stage, and the modules of multi-token prediction."""
        return list(self.model.layers.values())

    def shared_weights(self) -> list[nn.Parameter]:
        """The embedding, where another stage has it as its output projection or for multi-token prediction."""
        embedding = self.model.embed_tokens
        shared = self.stage.has_embedding != self.stage.has_head and (self.tied or self.config.mtp is not None)
        return [embedding.weight] if shared and embedding is not None else []

    def copied_weights(self) -> list[nn.Parameter]:
        """The embedding, where it embeds no input of the model."""
        return [] if self.stage.has_embedding else self.shared_weights()

    def new_caches(self, capacity: int) -> dict[int, KVCache]:
        """An empty cache of keys and values for each layer, with room for ``capacity`` tokens of each row."""
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
    ) -> Tensor:
        """Losses when ``labels`` are given, else logits; hidden states from a stage without the head.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], the token after each; or those 1, 2 ... 1+M ahead, [1+M, B, S], any past a row's end.
            position_ids: int64 [S] or [B, S]; by default 0, 1, 2 ..., or what follows the caches. With
                ``rope.sections`` also [3, B, S], of time, height and width.
            packed_seq_params: where documents begin, in whole rows; tokens see their own document only. With caches
                the rows have their capacity.
            dropout_key: of the step, with the global id of each token, int64 [B, S]; in training on one process it
                may be left out, and is drawn from torch's generator.
            caches: one for each layer, by its index; ``tokens`` then follow those in the caches.
            hidden: [S, B, H], [S/tp, B, H] under sequence parallelism: what the stage before gave.
            logits_to_keep: how many of the last positions logits are wanted of; by default of all.
            record: what routers are told of a training step and write to.

        Under context parallelism S stands for S/cp: this rank's tokens, those at ``zigzag_positions``.

        Returns:
            The loss of each label, [B, S] or [1+M, B, S] in float32 or wider; or logits [B, S, V], whole on every rank;
            or [S, B, H].

        Raises:
            ShapeError: more positions than ``max_position_embeddings``, unless ``position_ids`` are of each row, three
                streams of them without ``rope.sections``, an S that sequence parallelism cannot split, documents of
                other rows, labels of other depths, ``hidden`` that does not fit the stage, more tokens than caches have
                room for; under cp no ``position_ids``, or caches; ``logits_to_keep`` of rows that are split.
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
        context = self._context(tokens, position_ids, packed_seq_params, dropout_key, record)
        x: Tensor = self.model(tokens, position_ids, context, caches, hidden)
        if self.lm_head is None:
            return x
        if labels is None:
            x = self._last(x, logits_to_keep)
            return self._gather(self._logits(self.lm_head, x)).transpose(0, 1)  # [B, S, V]
        # FSDP2 hooks what a forward returns, and warns of a view
        return self._losses_ahead(self.lm_head, x, labels, context).clone()

    def _losses(self, head: ColumnParallelLinear, x: Tensor, labels: Tensor) -> Tensor:
        """[S, B] of hidden states [S, B, H], [S/tp, B, H] under sequence parallelism."""
        V, tp_group, weight = self.config.vocab_size, self.options.pg_collection.tp, self._tied_weight()
        assert V is not None
        x, softcap = self._before_head(x), self.config.multipliers.logit_softcap
        if not self.options.fused_linear_cross_entropy:
            return vocab_parallel_cross_entropy(head(x, weight), labels, V, tp_group, softcap=softcap)
        weight = head.weight if weight is None else weight
        assert weight is not None, "a head without a weight is tied"
        return vocab_parallel_linear_cross_entropy(
            x, local(weight), labels, V, tp_group, sequence_parallel=self.options.sequence_parallel, softcap=softcap
        )

    def _losses_ahead(self, head: ColumnParallelLinear, x: Tensor, labels: Tensor, context: LayerContext) -> Tensor:
        """[B, S] or [1+M, B, S], as ``labels`` are."""
        if labels.dim() == 2:
            return self._losses(head, x, labels.t()).t()
        states = self.model.predict_ahead(x, labels[:-1], context)
        return torch.stack([self._losses(head, read, each.t()).t() for read, each in zip(states, labels, strict=True)])

    def _logits(self, head: ColumnParallelLinear, x: Tensor) -> Tensor:
        """[S, B, V/tp] of hidden states as ``_losses`` takes them."""
        logits: Tensor = head(self._before_head(x), self._tied_weight())
        softcap = self.config.multipliers.logit_softcap
        if softcap is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (softcap * torch.tanh(wide / softcap)).to(logits.dtype)

    def _last(self, x: Tensor, num_positions: int | None) -> Tensor:
        """[S, B, H] -> [num_positions, B, H], by default all. Raises ShapeError for rows that ranks hold parts of."""
        if num_positions is None:
            return x
        if self.options.sequence_parallel or self.options.pg_collection.size("cp") > 1:
            raise ShapeError("the last positions of a row that is split are not on every rank; take all of its logits")
        return x[-num_positions:]

    def _before_head(self, x: Tensor) -> Tensor:
        """``x`` times the factor of the logits, which are many more."""
        multiplier = self.config.logits_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def _tied_weight(self) -> nn.Parameter | None:
        """The embedding, where it is the output projection."""
        embedding = self.model.embed_tokens
        return embedding.weight if self.tied and embedding is not None else None

    def _context(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        documents: PackedSeqParams | None,
        given: DropoutKey | None,
        record: MicroBatchRecord | None,
    ) -> LayerContext:
        rotary, rope = None, self.config.rope
        if rope is not None:
            rotary = rotary_tables(position_ids, self.config.rotary_head_size, rope, self.options.dtype)
        key = self._dropout_key(tokens, given) if self.training else None
        sequence_group = self.options.pg_collection.tp if self.options.sequence_parallel else None
        hidden_key = None if key is None else sequence_parallel_key(key, sequence_group)
        return LayerContext(
            documents=documents, rotary=rotary, token_dropout_key=key, hidden_dropout_key=hidden_key, record=record
        )

    def _gather(self, logits: Tensor) -> Tensor:
        """[S, B, V/tp] -> [S, B, V]; the last ranks' parts may be short, and travel padded."""
        V, groups = self.config.vocab_size, self.options.pg_collection
        assert V is not None
        longest = chunk_range(V, groups.size("tp"), 0)[1]
        padded = nn.functional.pad(logits, (0, longest - logits.shape[-1]))
        return gather_from_tensor_model_parallel_region(padded, groups.tp)[..., :V]

    def _dropout_key(self, tokens: Tensor, given: DropoutKey | None) -> DropoutKey | None:
        if given is not None or not self.drops():
            return given
        groups = self.options.pg_collection
        if groups.size("tp") > 1 or groups.size("cp") > 1:
            raise ConfigError(
                "the ranks of a tensor- or context-parallel model must drop the same elements; pass each of them "
                "dropout_key=DropoutKey(seed, step, token_ids) with the same seed and step"
            )
        token_ids = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        return DropoutKey(int(torch.randint(2**62, ())), 0, token_ids)

    def _check_labels(self, labels: Tensor | None) -> None:
        num_labels = 1 + (0 if self.config.mtp is None else self.config.mtp.num_modules)
        if labels is not None and labels.dim() == 3 and len(labels) != num_labels:
            raise ShapeError(
                f"labels [1+M, B, S] must be of the {num_labels} tokens after each that the model predicts; got "
                f"{len(labels)} of them"
            )

    def _check_documents(self, tokens: Tensor, cache: KVCache | None, documents: PackedSeqParams | None) -> None:
        B, S = tokens.shape
        whose, whole = "tokens'", S * self.options.pg_collection.size("cp")
        if cache is not None:
            whose, whole = "caches'", cache.capacity
        if documents is not None and (documents.batch_size, documents.seq_length) != (B, whole):
            raise ShapeError(
                f"packed_seq_params must be of the {whose} rows, [{B}, {whole}]; "
                f"got those of [{documents.batch_size}, {documents.seq_length}]"
            )

    def _check_split(self, *, is_split: bool) -> int:
        """The ranks of cp. Raises ShapeError where rows are not split over them, and there are several."""
        cp_size = self.options.pg_collection.size("cp")
        if cp_size > 1 and not is_split:
            raise _not_split(cp_size)
        return cp_size

    def _check_positions(self, position_ids: Tensor, num_positions: int) -> None:
        longest, rope = self.config.max_position_embeddings, self.config.rope
        if position_ids.dim() == 3 and (rope is None or rope.sections is None):
            raise ShapeError(
                f"position_ids must be [S] or [B, S] without model.rope.sections; got {list(position_ids.shape)}"
            )
        if position_ids.dim() > 1:  # a row's own may be fewer than its columns
            return
        if self.model.embed_positions is not None and longest is not None and longest < num_positions:
            raise ShapeError(
                f"{num_positions} positions are more than max_position_embeddings ({longest}); cut the tokens shorter"
            )

    def _check_shape(self, tokens: Tensor, hidden: Tensor | None) -> None:
        S, tp_size = tokens.shape[1], self.options.pg_collection.size("tp")
        if self.options.sequence_parallel and S % tp_size:
            raise ShapeError(
                f"sequence parallelism splits S ({S}) over tp ({tp_size}); use a sequence length that it divides"
            )
        if (hidden is None) != self.stage.has_embedding:
            raise ShapeError(
                "a stage that embeds tokens takes no hidden states, and one that does not needs those of the stage "
                f"before; this one has {'the' if self.stage.has_embedding else 'no'} embedding"
            )


def hidden_dtype(config: TransformerConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a stage's hidden states, of a model that computes in ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if config.residual.fp32 else dtype


def hidden_shape(config: TransformerConfig, options: BuildOptions, B: int, S: int) -> tuple[int, int, int]:
    """The shape of a stage's hidden states on this rank, for B rows of S tokens."""
    return S // (options.pg_collection.size("tp") if options.sequence_parallel else 1), B, config.hidden_size


def _not_split(cp_size: int) -> ShapeError:
    """The error for a call of a model whose rows are split over cp that does not say how they are."""
    return ShapeError(
        f"each of the {cp_size} ranks of context parallelism holds chunks of every row, without caches, and must be "
        "told which: pass tokens[:, positions] and position_ids=positions, where positions = zigzag_positions(S, "
        f"{cp_size}, cp_rank) of megalith.parallel.context.zigzag; or build the model without context parallelism"
    )
