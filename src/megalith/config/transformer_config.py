"""The shape of a transformer and the initialization of its weights."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from megalith.config.activations import GATES, Activation, GateActivation
from megalith.config.attention_config import AttentionConfig
from megalith.config.bert_config import BertConfig
from megalith.config.draft import round_up
from megalith.config.glu_config import GluConfig
from megalith.config.mla_config import MLAConfig, head_parts
from megalith.config.model_kind import ModelKind
from megalith.config.moe_config import MoEConfig
from megalith.config.mtp_config import MTPConfig
from megalith.config.multipliers_config import MultipliersConfig
from megalith.config.mup_config import MuPConfig
from megalith.config.recipes import known_preset, preset_names, read_preset
from megalith.config.relative_position_config import RelativePositionConfig
from megalith.config.relevance import has_effect
from megalith.config.residual_config import ResidualConfig
from megalith.config.rope_config import RopeConfig
from megalith.config.rules import MODEL_RULES, broken
from megalith.config.settings_group import FIELDS_ALONE, LARGEST_SIZE, Follows, SettingsGroup, draft_of_group, value_in
from megalith.config.t5_config import T5Config

__all__ = ["TransformerConfig"]


_MOST_LAYERS = 10_000  # the deepest transformers have 1000 (Wang et al. 2022, arXiv:2203.00555)


# fields for which latent attention has sizes of its own
_HEADS_OF_GROUPS = ("num_query_groups", "kv_channels")


def _usual_ffn_hidden_size(shape: Mapping[str, Any]) -> int:
    """4 x hidden; with a gate, three matrices of as many parameters: 8/3 x hidden, rounded up to a multiple of 64."""
    hidden: int = shape["hidden_size"]
    return round_up(-(-8 * hidden // 3), 64) if shape["activation"] in GATES else 4 * hidden


class TransformerConfig(SettingsGroup):
    """The model. The defaults are those of Llama; a field given here overrides that of the preset.

    Raises pydantic.ValidationError (a ValueError) for fields that are malformed or contradict each other. After
    construction every size is a number, derived if it was not given, except ``vocab_size``, which may come from the
    tokenizer later, and ``max_position_embeddings`` with rope.
    """

    dotted_name: ClassVar[str] = "model"

    preset: Annotated[str, AfterValidator(known_preset)] | None = Field(
        default=None,
        description="name of a predefined shape, which provides the fields not given here",
        examples=["llama-28m"],
    )
    vocab_size: int | None = Field(
        default=None, ge=1, le=LARGEST_SIZE, description="[entries] size of the vocabulary; null: the tokenizer's"
    )
    num_layers: int = Field(ge=1, le=_MOST_LAYERS, description="[layers] transformer layers", examples=[12])
    hidden_size: int = Field(
        ge=1, le=LARGEST_SIZE, description="[features] width of the residual stream", examples=[768]
    )
    num_attention_heads: int = Field(ge=1, le=LARGEST_SIZE, description="[heads] query heads", examples=[12])
    num_query_groups: int = Field(
        default_factory=Follows(lambda shape: shape["num_attention_heads"]),
        ge=1,
        le=LARGEST_SIZE,
        description="[heads] key and value heads (grouped-query attention); null: as many as query heads",
    )
    kv_channels: int = Field(
        default_factory=Follows(lambda shape: max(shape["hidden_size"] // shape["num_attention_heads"], 1)),
        ge=1,
        le=LARGEST_SIZE,
        description="[features] size of a query or key head; null: hidden_size / num_attention_heads, or that of mla",
    )
    activation: Activation = Field(
        default="swiglu",
        description="activation of the MLP: gated by SiLU, GELU, tanh-approximated GELU or x sigmoid(1.702 x), or "
        "without a gate",
    )
    glu: GluConfig | None = Field(default=None, description="clamp and offset of a gated activation")
    ffn_hidden_size: int = Field(
        default_factory=Follows(_usual_ffn_hidden_size),
        ge=1,
        le=LARGEST_SIZE,
        description="[features] inner width of the MLP; null: 4 x hidden_size, or with a gate 8/3 x hidden_size "
        "rounded up to a multiple of 64",
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = Field(default="RMSNorm", description="norm of the residual stream")
    layernorm_epsilon: float = Field(
        default=1e-5, gt=0, description="[variance] added under the square root in every norm"
    )
    position_embedding_type: Literal["rope", "learned_absolute", "relative"] = Field(
        default="rope",
        description="rotated queries and keys, a table of learned vectors, or a bias on scores by distance (T5)",
    )
    rope: RopeConfig | None = Field(default=None, description="rotary position embedding")
    relative_position: RelativePositionConfig | None = Field(
        default=None, description="the bias on scores by distance, for relative positions"
    )
    attention: AttentionConfig = Field(default_factory=AttentionConfig, description="self-attention")
    mla: MLAConfig | None = Field(
        default=None, description="multi-head latent attention, in place of grouped-query attention"
    )
    max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] rows of the learned position table; null: data.seq_length",
    )
    add_bias_linear: bool = Field(default=False, description="linear layers have biases")
    mlp_bias: bool = Field(
        default_factory=Follows(lambda shape: shape["add_bias_linear"]),
        description="linear layers of the MLP have biases; null: add_bias_linear",
    )
    tie_word_embeddings: bool = Field(
        default=False, description="the output projection shares the weights of the embedding table"
    )
    hidden_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="[probability] of dropping a feature of the residual stream"
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="[probability] of dropping an attention weight"
    )
    init_method_std: float = Field(default=0.02, gt=0, description="[standard deviation] of the initial weights")
    residual: ResidualConfig = Field(default_factory=ResidualConfig, description="the residual stream")
    multipliers: MultipliersConfig = Field(default_factory=MultipliersConfig, description="constant factors")
    mup: MuPConfig | None = Field(
        default=None, description="the maximal update parametrization; null: the standard parametrization"
    )
    moe: MoEConfig | None = Field(default=None, description="a mixture of experts in place of the MLP")
    mtp: MTPConfig | None = Field(default=None, description="multi-token prediction")
    bert: BertConfig | None = Field(
        default=None, description="a bidirectional encoder (BERT) in place of a causal decoder"
    )
    t5: T5Config | None = Field(default=None, description="an encoder and a decoder (T5) in place of a causal decoder")

    @classmethod
    def filled_in(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("preset") not in preset_names():
            return _with_latent_heads(given)
        preset = read_preset(given["preset"])
        value_of = value_in(cls, preset | given)
        # the preset's settings of rope are dropped without rope; the user's are kept, and rejected later
        of_preset = {name: value for name, value in preset.items() if has_effect(cls.name_of(name), value_of)}
        if "mla" in given:
            of_preset = {name: value for name, value in of_preset.items() if name not in _HEADS_OF_GROUPS}
        return _with_latent_heads(_merged(of_preset, given))

    @property
    def kind(self) -> ModelKind:
        """The kind of model, determined by which group of settings is present."""
        if self.t5 is not None:
            return "t5"
        return "gpt" if self.bert is None else "bert"

    @property
    def position_offset(self) -> int:
        """The rows of the learned position table before that of position 0."""
        return 0 if self.bert is None else self.bert.position_offset

    @property
    def longest_text(self) -> int | None:
        """The maximum number of tokens in a text; None without a learned position table, where there is no limit."""
        return self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else None

    @property
    def total_num_layers(self) -> int:
        """The number of layers, including those of the decoder in an encoder-decoder model."""
        return self.num_layers + (0 if self.t5 is None else self.t5.num_decoder_layers)

    @property
    def gate_activation(self) -> GateActivation | None:
        """The activation of the gate of a gated MLP, which has a third projection; None without a gate."""
        return GATES.get(self.activation)

    @property
    def expert_ffn_hidden_size(self) -> int:
        """The inner width of an expert, in a model that has experts."""
        given = None if self.moe is None else self.moe.ffn_hidden_size
        return self.ffn_hidden_size if given is None else given

    @property
    def rotary_head_size(self) -> int:
        """The features of a head to which rope applies; rope.percent may rotate only a share of them."""
        return self.kv_channels if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def width(self) -> float:
        """hidden_size relative to the base model whose hyperparameters muP transfers; 1 without muP."""
        return 1.0 if self.mup is None else self.hidden_size / self.mup.base_hidden_size

    @property
    def attention_scale(self) -> float | None:
        """The factor on q k^T; None: 1 / sqrt(kv_channels). With muP it is proportional to 1 / head size."""
        if self.mup is None or self.mup.base_kv_channels is None:
            return self.attention.scale
        return math.sqrt(self.mup.base_kv_channels) / self.kv_channels

    @property
    def logits_multiplier(self) -> float:
        """The factor on the logits."""
        return self.multipliers.logits / self.width

    @property
    def embedding_dropout(self) -> float:
        """The dropout probability of the embedding's features."""
        given = self.residual.embedding_dropout
        return self.hidden_dropout if given is None else given

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to q, k, v and the output gate have biases; with ``mla``, those to the latents."""
        return self.add_bias_linear if self.attention.qkv_bias is None else self.attention.qkv_bias

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.add_bias_linear if self.attention.output_bias is None else self.attention.output_bias

    @model_validator(mode="after")
    def _keeps_the_rules(self, info: ValidationInfo) -> Self:
        if info.context is not FIELDS_ALONE and (found := broken(draft_of_group(self), MODEL_RULES)):
            raise ValueError("; ".join(violation.message for violation in found))
        return self


def _with_latent_heads(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``given`` with the head size that its ``mla`` implies, if ``mla`` is well formed."""
    sizes = head_parts(given["mla"]) if isinstance(given.get("mla"), Mapping) else ()
    return {"kv_channels": sum(sizes), **given} if sizes and all(type(size) is int for size in sizes) else given


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges both group by group; ``over`` wins where both set a field."""
    merged = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], Mapping) and isinstance(over[name], Mapping):
            merged[name] = _merged(under[name], over[name])
    return merged
