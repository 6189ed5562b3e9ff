"""A transformer layer: attention and feed-forward, each added to the residual stream x, with norms around them.

pre       h = x + dropout(attention(norm(x)));           y = h + dropout(feed_forward(norm(h)))
post      h = norm(x + dropout(attention(x)));           y = norm(h + dropout(feed_forward(h)))
sandwich  h = x + dropout(norm(attention(norm(x))));     y = h + dropout(norm(feed_forward(norm(h))))

In the decoder of an encoder-decoder model, cross attention comes between the two, added and normed in the same way.

post: Vaswani et al. 2017, arXiv:1706.03762. pre: Xiong et al. 2020, arXiv:2002.04745. sandwich: Ding et al. 2021,
"CogView", arXiv:2105.13290; Gemma Team 2024, "Gemma 2", arXiv:2408.00118. The added terms may have a constant factor.
"""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.fusions import bias_dropout_add_fused_train
from megalith.numerics.dropout import Dropout
from megalith.parallel.build_options import BuildOptions
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.normalization import Normalization

__all__ = ["TransformerLayer"]


class TransformerLayer(nn.Module):
    """A layer built from the parts in ``spec``, with norms placed by ``config.residual.norm_placement``.

    In every placement ``post_attention_layernorm`` comes before the MLP; its input is the sum after attention.
    ``cross_attn_layernorm`` comes before cross attention in the same way.
    """

    def __init__(self, config: TransformerConfig, options: BuildOptions, spec: LayerSpec) -> None:
        super().__init__()
        placement = config.residual.norm_placement
        self.multiplier = config.multipliers.residual

        def norm_if(there: bool) -> Normalization | None:
            return spec.norm(config, options) if there else None

        self.input_layernorm = norm_if(placement != "post")
        self.self_attn = spec.attention(config, options)
        self.self_attn_output_layernorm = norm_if(placement == "sandwich")
        self.self_attn_dropout = DropoutSite(config.hidden_dropout)
        has_cross = spec.cross_attention is not None
        self.cross_attn_layernorm = norm_if(has_cross)
        self.cross_attn = None if spec.cross_attention is None else spec.cross_attention(config, options)
        self.cross_attn_output_layernorm = norm_if(has_cross and placement == "sandwich")
        self.cross_attn_dropout = DropoutSite(config.hidden_dropout) if has_cross else None
        self.post_attention_layernorm = spec.norm(config, options)
        self.mlp = spec.feed_forward(config, options)
        self.mlp_output_layernorm = norm_if(placement == "sandwich")
        self.mlp_dropout = DropoutSite(config.hidden_dropout)
        self.post_mlp_layernorm = norm_if(placement == "post")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        to_add = self._to_add(self.self_attn(normed, context), self.self_attn_output_layernorm)
        drops = self.self_attn_dropout.of(context.hidden_dropout_key)
        if self.cross_attn is not None and self.cross_attn_layernorm is not None:
            normed, x = self._summed(self.cross_attn_layernorm, to_add, x, drops)
            to_add = self._to_add(self.cross_attn(normed, context), self.cross_attn_output_layernorm)
            assert self.cross_attn_dropout is not None, "built together"
            drops = self.cross_attn_dropout.of(context.hidden_dropout_key)
        normed, x = self._summed(self.post_attention_layernorm, to_add, x, drops)
        fed_forward = self._to_add(self.mlp(normed, context), self.mlp_output_layernorm)
        dropout = self.mlp_dropout.of(context.hidden_dropout_key)
        if self.post_mlp_layernorm is not None:
            return self.post_mlp_layernorm.after_residual(fed_forward, x, dropout)[0]
        p, key = (0.0, None) if dropout is None else (dropout.p, dropout.key)
        return bias_dropout_add_fused_train((fed_forward, None), x, p, key=key)

    def _summed(self, norm: Normalization, y: Tensor, x: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
        """Adds ``y`` to the residual stream ``x``; returns the next sublayer's input and the stream (same if post)."""
        normed, x = norm.after_residual(y, x, dropout)
        return normed, x if self.post_mlp_layernorm is None else normed

    def _to_add(self, y: Tensor, norm: Normalization | None) -> Tensor:
        """Returns what a sublayer with output ``y`` adds to the residual stream, before dropout."""
        y = y if norm is None else norm(y)
        return y if self.multiplier == 1.0 else y * self.multiplier
