"""GPT: a causal decoder of Llama shape, GPT-2 shape, or any mix of their parts.

Parameter names are those of Hugging Face's Llama in every shape (``model.layers.0.self_attn.q_proj.weight``);
``models/hf`` renames them for architectures that call them otherwise.
"""

import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.numerics.dropout import DropoutKey, dropout
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.boxes import split_evenly
from megalith.parallel.parameters import local
from megalith.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from megalith.parallel.tensor.layers import ColumnParallelLinear, VocabParallelEmbedding
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.topology.collectives import gather_from_tensor_model_parallel_region
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.attention import KVCache
from megalith.transformer.block import TransformerBlock
from megalith.transformer.build_options import BuildOptions
from megalith.transformer.embeddings import LearnedPositions, sequence_parallel_key
from megalith.transformer.module import ModelModule
from megalith.transformer.rotary import rotary_table

__all__ = ["GPTModel"]


class GPTDecoder(TransformerBlock):
    """Embeddings, layers, final norm: tokens to hidden states."""

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        assert config.vocab_size is not None, "GPTModel has checked it"
        self.config = config
        self.sequence_group = options.pg_collection.tp if options.sequence_parallel else None
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            std=config.init_method_std,
            dtype=options.dtype,
            pg_collection=options.pg_collection,
            sequence_parallel=options.sequence_parallel,
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.embed_positions = LearnedPositions(config, options) if learned else None
        self.rope = config.rope

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        packed_seq_params: PackedSeqParams | None,
        dropout_key: DropoutKey | None,
        caches: list[KVCache] | None,
    ) -> Tensor:
        """int64 tokens [B, S], position_ids [S] or [B, S] -> [S, B, H]; [S/tp, B, H] under sequence parallelism."""
        x = self.embed_tokens(tokens)
        rotary = None
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        if self.rope is not None:
            rotary = rotary_table(position_ids, self.config.kv_channels, self.rope.base, x.dtype)
        if dropout_key is not None and self.config.hidden_dropout > 0.0:
            x = dropout(x, self.config.hidden_dropout, sequence_parallel_key(dropout_key, self.sequence_group))
        return self.run_layers(x, rotary, packed_seq_params, dropout_key, caches)


class GPTModel(ModelModule):
    """A causal language model.

    Args:
        config: the shape; ``vocab_size`` must be set.
        options: groups, dtype, sequence parallelism, recomputation; by default one process, with no torch.distributed.
        seed: of the first weights; built under ``torch.device("meta")`` none are drawn, see ``materialize``.

    Raises:
        ConfigError: the vocabulary's size is not known.
        ShapeError: sizes that tp cannot split.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions | None = None,
        *,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size is not set; give it, or name a tokenizer in data.tokenizer")
        options = options or BuildOptions(ProcessGroupCollection.single())
        self.config = config
        self.pg_collection = options.pg_collection
        self.sequence_parallel = options.sequence_parallel
        self.model = GPTDecoder(config, options)
        self.lm_head: ColumnParallelLinear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                bias=False,
                std=config.init_method_std,
                dtype=options.dtype,
                pg_collection=options.pg_collection,
                sequence_parallel=options.sequence_parallel,
            )
        self.finish(seed)

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout_key: DropoutKey | None = None,
        caches: list[KVCache] | None = None,
    ) -> Tensor:
        """Losses when ``labels`` are given, else logits.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], the token after each.
            position_ids: int64 [S] or [B, S]; by default 0, 1, 2 ..., or what follows the caches.
            packed_seq_params: where documents begin; tokens see their own document only.
            dropout_key: of the step, with the global id of each token, int64 [B, S]; in training on one process it
                may be left out, and is drawn from torch's generator.
            caches: one for each layer; ``tokens`` then follow those in the caches.

        Returns:
            The loss of each token, [B, S] in float32 or wider; or logits [B, S, V], whole on every rank.

        Raises:
            ShapeError: more positions than ``max_position_embeddings``, an S that sequence parallelism cannot split, or
                documents of other rows.
            ConfigError: training with dropout under tensor parallelism without a ``dropout_key``.
        """
        num_cached = caches[0].num_tokens if caches else 0
        self._check_shape(tokens, num_cached, packed_seq_params)
        if position_ids is None:
            position_ids = torch.arange(num_cached, num_cached + tokens.shape[1], device=tokens.device)
        dropout_key = self._dropout_key(tokens, dropout_key) if self.training else None
        x = self.model(tokens, position_ids, packed_seq_params, dropout_key, caches)
        logits = self._logits(x)  # [S, B, V/tp]
        if labels is None:
            return self._gather(logits).transpose(0, 1)
        assert self.config.vocab_size is not None
        tp_group = self.pg_collection.tp
        losses = vocab_parallel_cross_entropy(logits, labels.t(), self.config.vocab_size, tp_group)  # [S, B]
        return losses.t().clone()  # FSDP2 hooks what a forward returns, and warns of a view

    def _logits(self, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(x)
            return logits
        x = enter_tensor_parallel(x, self.pg_collection.tp, self.sequence_parallel)
        return nn.functional.linear(x, local(self.model.embed_tokens.weight))

    def _gather(self, logits: Tensor) -> Tensor:
        """[S, B, V/tp] -> [S, B, V]; the last ranks' parts may be short, and travel padded."""
        V, tp_size = self.config.vocab_size, self.pg_collection.tp_size
        assert V is not None
        longest = split_evenly(V, tp_size, 0)[1]
        padded = nn.functional.pad(logits, (0, longest - logits.shape[-1]))
        return gather_from_tensor_model_parallel_region(padded, self.pg_collection.tp)[..., :V]

    def _dropout_key(self, tokens: Tensor, given: DropoutKey | None) -> DropoutKey | None:
        if given is not None or self.config.hidden_dropout + self.config.attention_dropout == 0.0:
            return given
        if self.pg_collection.tp_size > 1:
            raise ConfigError(
                "the ranks of a tensor-parallel model must drop the same elements; pass each of them the same "
                "dropout_key=DropoutKey(seed, step, token_ids)"
            )
        token_ids = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        return DropoutKey(int(torch.randint(2**62, ())), 0, token_ids)

    def _check_shape(self, tokens: Tensor, num_cached: int, packed_seq_params: PackedSeqParams | None) -> None:
        B, S = tokens.shape
        if packed_seq_params is not None and (packed_seq_params.batch_size, packed_seq_params.seq_length) != (B, S):
            raise ShapeError(
                f"packed_seq_params must be of the tokens' rows, [{B}, {S}]; "
                f"got those of [{packed_seq_params.batch_size}, {packed_seq_params.seq_length}]"
            )
        longest = self.config.max_position_embeddings
        if self.model.embed_positions is not None and longest is not None and longest < num_cached + S:
            raise ShapeError(
                f"{num_cached + S} positions are more than max_position_embeddings ({longest}); cut the tokens shorter"
            )
        if self.sequence_parallel and S % self.pg_collection.tp_size:
            raise ShapeError(
                f"sequence parallelism splits S ({S}) over tp ({self.pg_collection.tp_size}); "
                "use a sequence length that it divides"
            )
