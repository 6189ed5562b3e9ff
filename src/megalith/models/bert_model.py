"""BERT: a bidirectional encoder, with heads that predict masked tokens, or classify or embed whole texts.

    post-norm   norm(word + position + type), then layers with a norm after each residual sum
    pre-norm    word + position + type, then layers with norms before each part, and a final norm

Devlin et al. 2019, arXiv:1810.04805; Liu et al. 2019, "RoBERTa", arXiv:1907.11692. The padding of each row is a
document of its own (``PackedSeqParams.from_padding``), so that no token attends to it.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megalith.config import BertConfig, TransformerConfig
from megalith.errors import ShapeError
from megalith.models.heads import (
    ClassificationHead,
    EmbeddingHead,
    MaskedLMTransform,
    Pooler,
    document_means,
    mean_embeddings,
    on_whole_rows,
)
from megalith.models.language_model import LanguageModel, Trunk, check_labels, check_mask
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.parallel.tensor.layers import ColumnParallelLinear
from megalith.transformer.attention_mask import BIDIRECTIONAL
from megalith.transformer.embeddings import ReplicatedEmbedding
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.layer_spec import LayerSpecs
from megalith.transformer.mup import scale_first_weights_
from megalith.transformer.normalization import Normalization
from megalith.transformer.stage import Stage

__all__ = ["BertModel", "BertOutput"]


class BertOutput(NamedTuple):
    """The output of a model with the pretraining head.

    ``predictions``: the loss of each label, [B, S] in float32 or wider, 0 where there is no label; logits [B, S, V] if
    no labels are given. ``binary_logits``: [N, 2], one row per pooled token; None without a binary head. ``hits``, in
    evaluation with labels: whether the label is the most likely token, bool [B, S], False where there is no label.
    """

    predictions: Tensor
    binary_logits: Tensor | None
    hits: Tensor | None = None


class BertEncoder(Trunk):
    """The trunk of a BERT: adds token type embeddings and, with post-norm layers, a norm after the embedding."""

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions,
        stage: Stage,
        spec_of: LayerSpecs | None,
        bert: BertConfig,
    ) -> None:
        reads_out = stage.has_head and bert.head == "pretraining" and config.tie_word_embeddings
        super().__init__(config, options, stage, spec_of, has_table=stage.has_embedding or reads_out)
        has_types = stage.has_embedding and bert.num_token_types > 0
        has_norm = stage.has_embedding and config.residual.norm_placement == "post"
        self.embed_token_types = ReplicatedEmbedding(bert.num_token_types, config, options) if has_types else None
        self.embed_norm = Normalization(config, options) if has_norm else None

    def embed_input(self, tokens: Tensor, position_ids: Tensor, token_types: Tensor | None) -> Tensor:
        """As in ``Trunk``; without ``token_types`` every token has type 0."""
        x = super().embed_input(tokens, position_ids, None)
        if self.embed_token_types is not None:
            x = x + self.embed_token_types(torch.zeros_like(tokens) if token_types is None else token_types)
        return x if self.embed_norm is None else self.embed_norm(x)


class BertModel(LanguageModel):
    """An encoder with the head named by ``config.bert.head``; arguments and errors as in ``GPTModel``."""

    kind = "bert"
    head_names = frozenset({"lm_transform", "lm_head", "pooler", "binary_head", "classifier", "embedder"})

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
        assert config.bert is not None, "checked by LanguageModel"
        self.head = config.bert.head
        self.model: BertEncoder = BertEncoder(config, self.options, self.stage, spec_of, config.bert)
        self.lm_transform: MaskedLMTransform | None = None
        self.lm_head: ColumnParallelLinear | None = None
        self.pooler: Pooler | None = None
        self._reads_means = False  # whether the head reads means instead of first tokens
        self.embedder: EmbeddingHead | None = None
        self.binary_head: ClassificationHead | None = None
        self.classifier: ClassificationHead | None = None
        if self.stage.has_head:
            self._build_heads(config, config.bert)
        scale_first_weights_(self, config)
        self.finish(seed)

    def shared_weights(self) -> list[nn.Parameter]:
        """Returns the embedding, if one stage embeds tokens and another uses it as tied output projection."""
        embedding = self.model.embed_tokens
        reads_out = self.tied and self.head == "pretraining"
        shared = reads_out and self.stage.has_embedding != self.stage.has_head
        return [embedding.weight] if shared and embedding is not None else []

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        pooled_tokens: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        hidden: Tensor | None = None,
        output: Literal["predictions", "hidden", "embeddings"] = "predictions",
    ) -> BertOutput | Tensor:
        """Returns the head's predictions; a stage without the head returns hidden states.

        Args:
            tokens: int64 [B, S]; for multiple_choice also [B, choices, S], like ``token_types`` and ``attention_mask``.
            labels: int64 [B, S], for pretraining: the original token at each masked position, below 0 at all others.
                Labels of V or more have a loss of NaN.
            token_types: int64 [B, S], below ``num_token_types``, for a model that has them; by default all 0.
            attention_mask: bool [B, S], False for padding, which may not lie between tokens. By default no padding.
            position_ids: int64 [S] or [B, S]; by default 0, 1, 2 ..., in RoBERTa from the first token after padding.
            packed_seq_params: document boundaries in whole rows, in place of ``attention_mask``.
            pooled_tokens: int64 [N], flat indices b * S + s of the tokens to pool, or whose documents to average; by
                default each row's first one that is not padding. With cp, those on this rank; by default rank 0's.
            dropout_key: as in ``GPTModel``; for tokens [B, choices, S] its token ids are [B * choices, S].
            hidden: [S, B, H], [S/tp, B, H] under sequence parallelism: the previous stage's output.
            output: what to return: the head's predictions, the hidden states, or ``mean_embeddings`` of each row.

        Under context parallelism S stands for S/cp: this rank's tokens, those at ``zigzag_positions``.

        Returns:
            ``BertOutput``; logits [N, num_classes] for classification; [B, choices] for multiple choice; embeddings
            [N, embedding_size]; hidden states [B, S, H]; embeddings [B, H]; or [S, B, H] from a stage without the head.

        Raises:
            ShapeError: as in ``GPTModel``; labels or masks of another shape; padding between tokens; ``attention_mask``
                together with documents, or for split rows; embeddings of packed or split rows; labels, choices or token
                types for a model without them.
            ConfigError: as in ``GPTModel``.
        """
        num_choices = self._num_choices(tokens)
        tokens = tokens.flatten(0, -2)
        token_types, attention_mask = (x if x is None else x.flatten(0, -2) for x in (token_types, attention_mask))
        self._check_shape(tokens, hidden)
        self._check_given(tokens, labels, token_types)
        if output == "embeddings":
            self._check_rows_are_texts(packed_seq_params)
        documents = self._documents(tokens, attention_mask, packed_seq_params)
        position_ids = self._positions(tokens, attention_mask, position_ids)
        context = self._context(tokens, position_ids, documents, dropout_key, mask=BIDIRECTIONAL)
        x: Tensor = self.model(tokens, position_ids, context, None, hidden, token_types)
        if not self.stage.has_head:
            return x
        x = self._whole(x)
        if output == "predictions":
            pooled = self._first_tokens(tokens, attention_mask) if pooled_tokens is None else pooled_tokens
            return self._predictions(x, labels, pooled, context, num_choices)
        return x.transpose(0, 1) if output == "hidden" else self._embeddings(x, attention_mask)

    def _num_choices(self, tokens: Tensor) -> int | None:
        """Returns the number of choices for tokens [B, choices, S]; None for [B, S]."""
        if tokens.dim() == 3 and self.head != "multiple_choice":
            raise ShapeError(
                f"tokens must be [B, S]; got {list(tokens.shape)}; only bert.head=multiple_choice takes [B, choices, S]"
            )
        return tokens.shape[1] if tokens.dim() == 3 else None

    def _positions(self, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        cp_size = self._check_split(is_split=position_ids is not None)
        counted = position_ids is None and attention_mask is not None and self.config.position_offset > 0
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        self._check_positions(position_ids, tokens.shape[1] * cp_size)
        if counted and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp_min(0)  # [B, S]
        return position_ids

    def _check_given(self, tokens: Tensor, labels: Tensor | None, token_types: Tensor | None) -> None:
        if labels is not None and self.head != "pretraining":
            raise ShapeError(
                f"labels are only for bert.head=pretraining; bert.head={self.head} returns "
                f"{'embeddings' if self.head == 'embedding' else 'logits'}: leave labels out, and compute the loss "
                "from them"
            )
        check_labels(labels, tokens)
        bert = self.config.bert
        if token_types is not None and bert is not None and bert.num_token_types == 0:
            raise ShapeError("this model has no token types (model.bert.num_token_types=0); leave token_types out")

    def _check_rows_are_texts(self, documents: PackedSeqParams | None) -> None:
        if self.options.pg_collection.size("cp") > 1:
            raise ShapeError(
                "embeddings are not supported with context parallelism, because no rank holds whole rows to average; "
                "set parallel.context=1"
            )
        if documents is not None:
            raise ShapeError(
                "embeddings need one text per row, but packed rows hold several; pass attention_mask instead of "
                'packed_seq_params, or average output="hidden" over each text'
            )

    def _predictions(
        self,
        x: Tensor,
        labels: Tensor | None,
        pooled_tokens: Tensor,
        context: LayerContext,
        num_choices: int | None,
    ) -> BertOutput | Tensor:
        """Applies the head to hidden states [S, B, H]; returns predictions as ``forward`` does."""
        if self.lm_head is not None:
            found, hits = self._of_tokens(self.lm_head, x, labels)
            return BertOutput(found, self._of_texts(x, pooled_tokens, context), hits)
        if self.embedder is not None:
            embeddings: Tensor = self.embedder(self._states_of_texts(x, pooled_tokens, context))
            return embeddings
        scores = self._of_texts(x, pooled_tokens, context)
        assert scores is not None, "only pretraining has no classifier"
        return scores if num_choices is None else scores.view(-1, num_choices)

    def _build_heads(self, config: TransformerConfig, bert: BertConfig) -> None:
        assert config.vocab_size is not None, "checked by LanguageModel"
        std, drops = config.init_method_std, bert.classifier_dropout
        if bert.head == "embedding":
            self._reads_means = bert.embedding_pooling == "mean"
            self.embedder = EmbeddingHead(
                config, self.options, bert.embedding_size, normalize=bert.normalize_embeddings
            )
            return
        if bert.head != "pretraining":
            self.pooler = Pooler(config, self.options, bert.classifier_activation)
            self._reads_means = bert.classifier_pooling == "mean"
            self.classifier = ClassificationHead(
                config, self.options, bert.num_text_scores, config.hidden_dropout if drops is None else drops
            )
            return
        self.lm_transform = MaskedLMTransform(config, self.options)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            on_whole_rows(self.options),
            bias=True,
            std=std,
            has_weight=not self.tied,
        )
        if bert.binary_head:
            self.pooler = Pooler(config, self.options)
            self.binary_head = ClassificationHead(config, self.options, bert.num_text_scores, 0.0)

    def _of_tokens(self, head: ColumnParallelLinear, x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Losses and hits [B, S], or logits [B, S, V] and None, from hidden states [S, B, H]."""
        assert self.lm_transform is not None, "built with the output projection"
        if labels is None:
            return self._gather(self._logits(head, self.lm_transform(x))).transpose(0, 1), None  # [B, S, V]
        S, B, _ = x.shape
        wanted = (labels.t() >= 0).flatten().nonzero().flatten()  # [N], one in six or seven in pretraining
        rows, labels = self.lm_transform(x.flatten(0, 1)[wanted]), labels.t().flatten()[wanted]  # [N, H], [N]

        def at_their_places(found: Tensor) -> Tensor:
            return found.new_zeros(S * B).index_put((wanted,), found).view(S, B).t().clone()  # [B, S]

        losses = at_their_places(self._losses(head, rows, labels))
        return losses, None if self.training else at_their_places(self._are_likeliest(head, rows, labels))

    def _of_texts(self, x: Tensor, pooled_tokens: Tensor, context: LayerContext) -> Tensor | None:
        """Scores [N, classes] from hidden states [S, B, H]; None without a head for pooled tokens."""
        head = self.classifier if self.binary_head is None else self.binary_head
        if head is None or self.pooler is None:
            return None
        pooled = self.pooler(self._states_of_texts(x, pooled_tokens, context))
        key, S = context.token_dropout_key, x.shape[0]
        of_pooled = None if key is None else replace(key, tokens=key.tokens[pooled_tokens // S, pooled_tokens % S])
        scores: Tensor = head(pooled, of_pooled)
        return scores

    def _states_of_texts(self, x: Tensor, pooled_tokens: Tensor, context: LayerContext) -> Tensor:
        """States [N, H] of the pooled tokens, or the means over their texts, of hidden states [S, B, H]."""
        S = x.shape[0]
        row, place = pooled_tokens // S, pooled_tokens % S
        return self._means(x, row, place, context.documents) if self._reads_means else x[place, row]

    def _means(self, x: Tensor, row: Tensor, place: Tensor, documents: PackedSeqParams | None) -> Tensor:
        """Means [N, H] over the documents of the tokens at ``place`` in ``row``, of hidden states [S/cp, B, H]."""
        S, B, _ = x.shape
        groups = self.options.pg_collection
        whole = S * groups.size("cp")
        ids, rows = torch.zeros(B, whole, dtype=torch.long, device=x.device), list[list[tuple[int, int]]]()
        if documents is not None:
            ids, rows = documents.document_ids(), documents.rows()
        # a text and its padding, or more: what ranks of cp exchange does not depend on whether texts fill their rows
        most = max([2, *map(len, rows)])
        columns = zigzag_positions(whole, groups.size("cp"), groups.rank("cp"), x.device)
        means = document_means(x, ids, most, columns, groups.cp)
        return means[row, ids[row, columns[place]]].to(x.dtype)

    def _first_tokens(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Flat indices of each row's first token, int64 [B]; empty on ranks of cp that do not hold them."""
        B, S = tokens.shape
        num_here = B if self.options.pg_collection.rank("cp") == 0 else 0
        starts = torch.arange(num_here, device=tokens.device) * S
        return starts if attention_mask is None else starts + attention_mask.long().argmax(dim=1)

    def _embeddings(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        S, B, _ = x.shape
        is_token = torch.ones(B, S, dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask
        return mean_embeddings(x, is_token)

    def _documents(
        self, tokens: Tensor, attention_mask: Tensor | None, documents: PackedSeqParams | None
    ) -> PackedSeqParams | None:
        self._check_documents(tokens, None, documents)
        if attention_mask is None:
            return documents
        if documents is not None or self.options.pg_collection.size("cp") > 1:
            raise ShapeError(
                "attention_mask cannot be combined with packed_seq_params or with context parallelism; pass only "
                "packed_seq_params, such as PackedSeqParams.from_padding(attention_mask) of whole rows"
            )
        check_mask("attention_mask", attention_mask, tokens)
        return PackedSeqParams.from_padding(attention_mask.cpu()).to(attention_mask.device)
