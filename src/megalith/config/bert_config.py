"""BERT: what an encoder has besides the blocks that every model shares, and what it is trained for."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["BertConfig"]


class BertConfig(SettingsGroup):
    """An encoder that reads both ways (Devlin et al. 2019, arXiv:1810.04805), in place of a causal decoder."""

    dotted_name: ClassVar[str] = "model.bert"

    num_token_types: int = Field(
        ge=0,
        le=LARGEST_SIZE,
        description="[types] of tokens that have a learned vector: 2 for pairs of sentences, 1 for RoBERTa, 0: none",
        examples=[2],
    )
    head: Literal["pretraining", "classification", "multiple_choice"] = Field(
        default="pretraining",
        description="what the model predicts: masked tokens, the class of a text, or which of several texts fits",
    )
    binary_head: bool = Field(
        default=True,
        description="also predict, by the pooled first token, whether two segments are in their order (ALBERT)",
    )
    num_classes: int | None = Field(default=None, ge=2, le=LARGEST_SIZE, description="[classes] of texts; required")
    classifier_dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="[probability] of dropping a feature of the pooled token; null: model.hidden_dropout",
    )
    classifier_activation: Literal["tanh", "gelu", "gelu_tanh", "relu"] = Field(
        default="tanh",
        description="after the linear layer that pools a token for the classifier; RoFormer has model.activation there",
    )
    position_offset: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="[rows] of the table of learned positions before the row of position 0; RoBERTa: 2",
    )
