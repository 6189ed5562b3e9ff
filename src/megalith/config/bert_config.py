"""BERT: what an encoder has besides the layers that all models share, and its training objective."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["BertConfig"]


class BertConfig(SettingsGroup):
    """A bidirectional encoder (Devlin et al. 2019, arXiv:1810.04805), in place of a causal decoder."""

    dotted_name: ClassVar[str] = "model.bert"

    num_token_types: int = Field(
        ge=0,
        le=LARGEST_SIZE,
        description="[types] of tokens with a learned embedding: 2 for sentence pairs, 1 for RoBERTa, 0: none",
        examples=[2],
    )
    head: Literal["pretraining", "classification", "multiple_choice", "embedding"] = Field(
        default="pretraining",
        description="what the model predicts: masked tokens, the class of a text, which of several texts fits, or an "
        "embedding of a text for retrieval",
    )
    binary_head: bool = Field(
        default=True,
        description="also predict from the pooled first token whether two segments are in order (ALBERT)",
    )
    num_classes: int | None = Field(
        default=None, ge=2, le=LARGEST_SIZE, description="[classes] that texts are assigned to; required"
    )
    classifier_dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="[probability] of dropping a feature of the pooled state; null: model.hidden_dropout",
    )
    classifier_pooling: Literal["first", "mean"] = Field(
        default="first",
        description="what represents a text for the classifier: its first token, or the mean over all its tokens "
        "including special ones (as in ModernBERT)",
    )
    classifier_activation: Literal["tanh", "gelu", "gelu_tanh", "relu"] = Field(
        default="tanh",
        description="activation after the pooler's linear layer; RoFormer uses model.activation",
    )
    embedding_pooling: Literal["first", "mean"] = Field(
        default="mean",
        description="what a text's embedding is computed from: its first token, or the mean over all its tokens "
        "including special ones",
    )
    embedding_size: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[features] of an embedding, after a linear projection; null: model.hidden_size, no projection",
    )
    normalize_embeddings: bool = Field(
        default=True, description="divide embeddings by their norm, so that similarities are cosines"
    )
    similarity_temperature: float = Field(
        default=0.05, gt=0, description="[factor] by which similarities are divided in the contrastive loss"
    )
    position_offset: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="[rows] of the learned position table before that of position 0; RoBERTa: 2",
    )

    @property
    def num_text_scores(self) -> int:
        """The number of scores that the model gives a text from its pooled state; 0 without a head for that."""
        if self.head == "pretraining":
            return 2 if self.binary_head else 0  # in order or swapped
        if self.head == "embedding":
            return 0
        return 1 if self.num_classes is None else self.num_classes  # of a choice; of each class
