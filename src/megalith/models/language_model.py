"""What all language models share: a stage's embeddings, layers and final norm, and the output projection.

Every kind of model uses the parameter names of Hugging Face's Llama (``model.layers.0.self_attn.q_proj.weight``);
``models/hf`` renames them for architectures with other names.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalith.config import ModelKind, TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.numerics.dropout import DropoutKey, dropout
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.parameters import local
from megalith.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megalith.parallel.tensor.layers import ColumnParallelLinear, VocabParallelEmbedding
from megalith.topology.collectives import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.attention_mask import CAUSAL, AttentionMask
from megalith.transformer.dropout import DropoutSite, of_sequence_parallel_rank, sequence_parallel_key
from megalith.transformer.embeddings import LearnedPositions
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import LayerSpecs
from megalith.transformer.module import ModelModule
from megalith.transformer.normalization import Normalization
from megalith.transformer.rotary import rotary_tables
from megalith.transformer.stack import LayerStack
from megalith.transformer.stage import Stage
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["LanguageModel", "TokenEmbedder", "Trunk", "check_labels", "check_mask", "hidden_dtype", "hidden_shape"]


class TokenEmbedder(nn.Module, ABC):
    """Base class of trunks; holds the token embedding table in stages that embed tokens, project to logits, or both."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.embed_positions: LearnedPositions | None = None

    def add_table_(self, options: BuildOptions) -> None:
        """Creates the table; a constructor calls this where the table belongs in the order of parameters."""
        V, H, std = self.config.vocab_size, self.config.hidden_size, self.config.init_method_std
        assert V is not None, "checked by LanguageModel"
        self.embed_tokens = VocabParallelEmbedding(V, H, options, std=std)

    @abstractmethod
    def all_layers(self) -> list[nn.Module]:
        """Returns the layers of this stage, in order."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens and applies the embedding multiplier.

        int64 [B, S] -> [S, B, H] in the dtype of the residual stream; [S/tp, B, H] under sequence parallelism.
        """
        assert self.embed_tokens is not None, "only called in a stage with the embedding"
        x: Tensor = self.embed_tokens(tokens)  # [S, B, H]
        x, multiplier = x.to(hidden_dtype(self.config, x.dtype)), self.config.multipliers.embedding
        return x if multiplier == 1.0 else x * multiplier


class Trunk(TokenEmbedder):
    """Embeddings, layers and final norm: maps tokens to hidden states, or computes one stage's part of that.

    Args:
        has_table: whether this stage holds the token embedding table, as its input, its output projection, or both.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions,
        stage: Stage,
        spec_of: LayerSpecs | None,
        *,
        has_table: bool,
    ) -> None:
        super().__init__(config)
        learned = config.position_embedding_type == "learned_absolute"
        self.stage = stage
        self.layers = LayerStack(config, options, stage.layers, spec_of)
        # with post-norm, the last layer already ends in a norm
        has_norm = stage.has_head and config.residual.norm_placement != "post"
        self.norm = Normalization(config, options) if has_norm else None
        if has_table:
            self.add_table_(options)
        if stage.has_embedding and learned:
            self.embed_positions = LearnedPositions(config, options)
        self.embedding_dropout = DropoutSite(config.embedding_dropout)

    def all_layers(self) -> list[nn.Module]:
        """Returns the transformer layers and the multi-token prediction modules."""
        return list(self.layers.values())

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        context: LayerContext,
        caches: Mapping[int, KVCache] | None,
        hidden: Tensor | None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """int64 tokens [B, S], position_ids [S] or [B, S] -> [S, B, H]; [S/tp, B, H] under sequence parallelism.

        ``hidden`` has the output's shape: it is the previous stage's output, for a stage without the embedding.
        ``token_types``, int64 [B, S], are for models that have token types.
        """
        if self.stage.has_embedding:
            hidden = self.embed_input(tokens, position_ids, token_types)
            drops = self.embedding_dropout.of(context.hidden_dropout_key)
            if drops is not None and drops.key is not None:
                hidden = dropout(hidden, drops.p, drops.key)
        x: Tensor = self.layers(hidden, context, caches)
        return x if self.norm is None else self.norm(x)

    def embed_input(self, tokens: Tensor, position_ids: Tensor, token_types: Tensor | None) -> Tensor:
        """Returns the input of the first layer, before dropout; arguments and shapes as in ``forward``."""
        x = self.embed(tokens)
        return x if self.embed_positions is None else x + self.embed_positions(position_ids)


class LanguageModel(ModelModule):
    """Base class of all models: a trunk, and an output projection over a vocabulary that is split over tp.

    Raises:
        ConfigError: the settings describe another kind of model, the vocabulary size is not known, or the model has no
            such stage.
    """

    kind: ClassVar[ModelKind]
    model: TokenEmbedder
    lm_head: ColumnParallelLinear | None

    def __init__(self, config: TransformerConfig, options: BuildOptions | None, stage: Stage | None) -> None:
        super().__init__()
        if config.kind != self.kind:
            raise ConfigError(
                f"{type(self).__name__} needs settings of a {self.kind} model; got settings of a {config.kind} model"
            )
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size is not set; set it, or set data.tokenizer")
        self.options = options or BuildOptions(ProcessGroupCollection.single())
        self.stage = stage or Stage.whole(config.total_num_layers)
        self.stage.check_fits(config.total_num_layers)
        self.tied = config.tie_word_embeddings
        self.config = config

    def layers(self) -> list[nn.Module]:
        """Returns the transformer layers of this stage and its multi-token prediction modules."""
        return self.model.all_layers()

    def copied_weights(self) -> list[nn.Parameter]:
        """Returns the shared embedding in a stage that does not embed the model's input."""
        return [] if self.stage.has_embedding else self.shared_weights()

    def _losses(self, head: ColumnParallelLinear, x: Tensor, labels: Tensor) -> Tensor:
        """Losses of ``labels`` [...] in float32 or wider; ``x`` is [..., H], or [S/tp, B, H] if ``head`` gathers."""
        V, tp_group, weight = self.config.vocab_size, self.options.pg_collection.tp, self._tied_weight()
        assert V is not None
        x, softcap = self._before_head(x), self.config.multipliers.logit_softcap
        if not self.options.fused_linear_cross_entropy:
            return vocab_parallel_cross_entropy(head(x, weight), labels, V, tp_group, softcap=softcap)
        weight = head.weight if weight is None else weight
        assert weight is not None, "a head without its own weight must be tied"
        return vocab_parallel_linear_cross_entropy(
            x,
            local(weight),
            labels,
            V,
            tp_group,
            bias=None if head.bias is None else local(head.bias),
            sequence_parallel=head.options.sequence_parallel,
            softcap=softcap,
        )

    def _logits(self, head: ColumnParallelLinear, x: Tensor) -> Tensor:
        """Logits [S, B, V/tp] of hidden states, which have the shapes that ``_losses`` takes."""
        logits: Tensor = head(self._before_head(x), self._tied_weight())
        softcap = self.config.multipliers.logit_softcap
        if softcap is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (softcap * torch.tanh(wide / softcap)).to(logits.dtype)

    def _are_likeliest(self, head: ColumnParallelLinear, x: Tensor, labels: Tensor) -> Tensor:
        """bool [...] like ``labels``: whether each label is the argmax of its logits."""
        return self._gather(self._logits(head, x)).argmax(-1) == labels

    def _before_head(self, x: Tensor) -> Tensor:
        """Applies the logits multiplier to ``x``, which has far fewer elements than the logits."""
        multiplier = self.config.logits_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def _tied_weight(self) -> nn.Parameter | None:
        """The embedding, if it is tied to the output projection."""
        embedding = self.model.embed_tokens
        return embedding.weight if self.tied and embedding is not None else None

    def _context(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        documents: PackedSeqParams | None,
        given: DropoutKey | None,
        record: MicroBatchRecord | None = None,
        mask: AttentionMask = CAUSAL,
        is_token: Tensor | None = None,
    ) -> LayerContext:
        rotary, rope = None, self.config.rope
        if rope is not None:
            rotary = rotary_tables(position_ids, self.config.rotary_head_size, rope, self.options.dtype)
        key = self._dropout_key(tokens, given) if self.training else None
        sequence_group = self.options.pg_collection.tp if self.options.sequence_parallel else None
        hidden_key = None if key is None else sequence_parallel_key(key, sequence_group)
        return LayerContext(
            mask,
            documents,
            rotary,
            token_dropout_key=key,
            hidden_dropout_key=hidden_key,
            record=record,
            padding_mask=None if is_token is None else of_sequence_parallel_rank(is_token, sequence_group),
        )

    def _gather(self, logits: Tensor) -> Tensor:
        """[S, B, V/tp] -> [S, B, V]; the last ranks' parts may be shorter, and are padded for the all-gather."""
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
                "all ranks of a tensor- or context-parallel model must drop the same elements; pass "
                "dropout_key=DropoutKey(seed, step, token_ids) with the same seed and step on every rank"
            )
        token_ids = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        return DropoutKey(int(torch.randint(2**62, ())), 0, token_ids)

    def _check_documents(self, tokens: Tensor, cache: KVCache | None, documents: PackedSeqParams | None) -> None:
        B, S = tokens.shape
        whose, whole = "tokens'", S * self.options.pg_collection.size("cp")
        if cache is not None:
            whose, whole = "caches'", cache.capacity
        if documents is not None and (documents.batch_size, documents.seq_length) != (B, whole):
            raise ShapeError(
                f"packed_seq_params must have the {whose} batch size and row length, [{B}, {whole}]; "
                f"got [{documents.batch_size}, {documents.seq_length}]"
            )

    def _check_split(self, *, is_split: bool) -> int:
        """Returns the size of cp. Raises ShapeError if it is above 1 and rows are not split."""
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
        if position_ids.dim() > 1:  # positions given per row may end before its columns do
            return
        if self.model.embed_positions is not None and longest is not None and longest < num_positions:
            raise ShapeError(f"{num_positions} positions exceed max_position_embeddings ({longest}); use shorter rows")

    def _whole(self, x: Tensor) -> Tensor:
        """Gathers hidden states split by sequence parallelism to [S, B, H], for heads that run alike on all ranks."""
        sequence_group = self.options.pg_collection.tp if self.options.sequence_parallel else None
        return gather_from_sequence_parallel_region(x, sequence_group, tensor_parallel_output_grad=False)

    def _check_shape(self, tokens: Tensor, hidden: Tensor | None) -> None:
        S, tp_size = tokens.shape[1], self.options.pg_collection.size("tp")
        if self.options.sequence_parallel and S % tp_size:
            raise ShapeError(
                f"S ({S}) must be divisible by tp ({tp_size}) with sequence parallelism; use a multiple of {tp_size}"
            )
        if (hidden is None) != self.stage.has_embedding:
            raise ShapeError(
                "a stage with the embedding takes no hidden states, and any other stage needs those of the previous "
                f"stage; this stage has {'the' if self.stage.has_embedding else 'no'} embedding"
            )


def check_labels(labels: Tensor | None, tokens: Tensor) -> None:
    """Raises ShapeError unless ``labels`` have the shape [B, S] of ``tokens``."""
    if labels is not None and labels.shape != tokens.shape:
        raise ShapeError(f"labels must have the shape of the tokens, {list(tokens.shape)}; got {list(labels.shape)}")


def check_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    """Raises ShapeError unless the padding ``mask`` is bool and has the shape [B, S] of ``tokens``."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ShapeError(
            f"{name} must be bool with the shape of the tokens, {list(tokens.shape)}, and False for padding; got "
            f"{mask.dtype} {list(mask.shape)}"
            f"{'' if mask.dtype == torch.bool else f'; convert a mask of ones and zeros with {name}.bool()'}"
        )


def hidden_dtype(config: TransformerConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a stage's hidden states, for a model that computes in ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if config.residual.fp32 else dtype


def hidden_shape(config: TransformerConfig, options: BuildOptions, B: int, S: int) -> tuple[int, int, int]:
    """Returns the shape of a stage's hidden states on this rank, for B rows of S tokens."""
    return S // (options.pg_collection.size("tp") if options.sequence_parallel else 1), B, config.hidden_size


def _not_split(cp_size: int) -> ShapeError:
    """Returns the error for calling a context-parallel model without saying how rows are split."""
    return ShapeError(
        f"with context parallelism, each of the {cp_size} ranks takes its own chunks of every row, and no caches: pass "
        "tokens[:, positions] and position_ids=positions, where positions = zigzag_positions(S, "
        f"{cp_size}, cp_rank) from megalith.parallel.context.zigzag; or build the model without context parallelism"
    )
