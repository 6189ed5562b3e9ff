"""One transformer layer: norm, attention, residual; norm, feed-forward, residual.

h = x + dropout(attention(norm(x)));   y = h + dropout(feed_forward(norm(h)))
"""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.fusions import bias_dropout_add_fused_train
from megalith.parallel.build_options import BuildOptions
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.layer_spec import LayerSpec

__all__ = ["TransformerLayer"]


class TransformerLayer(nn.Module):
    """A layer of the parts that ``spec`` names."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, spec: LayerSpec) -> None:
        super().__init__()
        self.input_layernorm = spec.norm(config, options)
        self.self_attn = spec.attention(config, options)
        self.self_attn_dropout = DropoutSite(config.hidden_dropout)
        self.post_attention_layernorm = spec.norm(config, options)
        self.mlp = spec.feed_forward(config, options)
        self.mlp_dropout = DropoutSite(config.hidden_dropout)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H], of [S/tp, B, H] each under sequence parallelism."""
        attended = self.self_attn(self.input_layernorm(x), context)
        normed, x = self.post_attention_layernorm.after_residual(
            attended, x, self.self_attn_dropout.of(context.hidden_dropout_key)
        )
        dropout = self.mlp_dropout.of(context.hidden_dropout_key)
        p, key = (0.0, None) if dropout is None else (dropout.p, dropout.key)
        return bias_dropout_add_fused_train((self.mlp(normed, context), None), x, p, key=key)
