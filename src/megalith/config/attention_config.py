"""What attention sees, and what it computes besides softmax(q k^T / sqrt(D)) v."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.layer_pattern import LayerPattern, holds
from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["AttentionConfig"]


class AttentionConfig(SettingsGroup):
    """Attention of every layer; the defaults are those of Llama."""

    dotted_name: ClassVar[str] = "model.attention"

    window: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] that a query attends to, including its own (sliding window); with model.bert, that many "
        "on either side; null: all up to its own, with model.bert all",
        examples=[4096],
    )
    window_layers: LayerPattern | None = Field(
        default=None,
        description="which layers have the window, repeated from layer 0 on; null: all layers",
        examples=[[True, True, True, True, True, False]],
    )
    softmax: Literal["vanilla", "off_by_one", "learnable"] = Field(
        default="vanilla",
        description="an extra score in every softmax, which attends to nothing: none, 0, or one learned per head (a "
        "sink, as in gpt-oss)",
    )
    qk_norm: Literal["RMSNorm", "LayerNorm", "L2"] | None = Field(
        default=None,
        description="norm of each head's queries and keys, before rope; L2: RMSNorm without a weight",
    )
    output_gate: bool = Field(
        default=False,
        description="multiply the attention output elementwise by sigmoid(gate_proj(x)) (Qwen3-Next)",
    )
    logit_softcap: float | None = Field(
        default=None, gt=0, description="[score] c: scores become c tanh(score / c), which is within c (Gemma 2)"
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        description="[factor] on q k^T; null: 1 / sqrt(model.kv_channels), with model.mla times the square of "
        "yarn's mscale_all_dim factor",
    )
    qkv_bias: bool | None = Field(
        default=None,
        description="biases of the projections to q, k, v and the gate, with model.mla of those to the latents; null: "
        "model.add_bias_linear",
    )
    output_bias: bool | None = Field(
        default=None, description="bias of the output projection; null: model.add_bias_linear"
    )

    @property
    def norm_parameters(self) -> tuple[str, ...]:
        """The parameters, [D] each, of the norm of queries and of the norm of keys."""
        return {"RMSNorm": ("weight",), "LayerNorm": ("weight", "bias")}.get(self.qk_norm or "", ())

    def window_of(self, layer_index: int) -> int | None:
        """The window of the layer with this global index; None if it has none."""
        if self.window_layers is None or holds(self.window_layers, layer_index):
            return self.window
        return None
