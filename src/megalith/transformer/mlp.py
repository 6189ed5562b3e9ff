"""The feed-forward part of a layer, with F split over tp.

gated      y = (act(x Wg^T) * (x Wu^T)) Wd^T          Shazeer 2020, "GLU Variants", arXiv:2002.05202
           act: silu for swiglu, gelu for geglu, ...; optionally with a clamp and an offset, as in megalith.fusions.glu
not gated  y = act(x Wu^T) Wd^T                       exact gelu, or the tanh form of GPT-2; relu; relu^2

Squared ReLU: So et al. 2021, "Primer", arXiv:2109.08668. Every product may have a bias; T5 has dropout before Wd.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.config.activations import Activation
from megalith.fusions import bias_gelu_impl, glu, weighted_squared_relu_impl
from megalith.fusions.activation.bias_gelu import Approximate, should_fuse_bias
from megalith.numerics.dropout import Dropout, dropout
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.parameters import local
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.initialization import output_std
from megalith.transformer.layer_context import LayerContext

__all__ = ["MLP", "plain_activation"]

# activations that can add a bias
_APPROXIMATE: Mapping[Activation, Approximate] = {"gelu": "none", "gelu_tanh": "tanh"}


class MLP(nn.Module):
    """The feed-forward network with ``config.activation``.

    Args:
        ffn_hidden_size: F; by default the model's.
        inner_dropout: the fraction of the F features to drop in training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions,
        *,
        ffn_hidden_size: int | None = None,
        inner_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        H, F = config.hidden_size, ffn_hidden_size or config.ffn_hidden_size
        self.activation, self.gate_activation = config.activation, config.gate_activation
        self.gating = config.glu
        self.options = options
        bias, std = config.mlp_bias, config.init_method_std

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(H, F, options, bias=bias, std=std, input_is_gathered=True)

        self.gate_proj = column() if self.gate_activation is not None else None
        self.up_proj = column()
        self.may_fuse_bias = bias and self.activation in _APPROXIMATE and self.gate_proj is None
        self.entered, self.activated = DiscardableOutput("layernorm"), DiscardableOutput("mlp_act")
        self.inner_dropout = DropoutSite(inner_dropout) if inner_dropout else None
        groups = options.pg_collection
        self.feature_offset = chunk_range(F, groups.size("tp"), groups.rank("tp"))[0]
        self.down_proj = RowParallelLinear(F, H, options, bias=bias, std=output_std(config))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]."""
        groups = self.options.pg_collection
        x = self.entered(enter_tensor_parallel, x, groups.tp, self.options.sequence_parallel)  # [S, B, H]
        # where the fused activation adds the bias in its own pass, the product on a CPU would take one more
        fuses_bias = self.may_fuse_bias and should_fuse_bias(x, _APPROXIMATE[self.activation])
        up = self.up_proj(x, skip_bias_add=fuses_bias)  # [S, B, F/tp]
        bias = local(self.up_proj.bias) if fuses_bias and self.up_proj.bias is not None else None
        gate = None if self.gate_proj is None else self.gate_proj(x)  # [S, B, F/tp]
        drops = None if self.inner_dropout is None else self.inner_dropout.of(context.token_dropout_key)
        y: Tensor = self.down_proj(self.activated(self._inner, up, bias, gate, drops))
        return y

    def _inner(self, up: Tensor, bias: Tensor | None, gate: Tensor | None, drops: Dropout | None) -> Tensor:
        y = self._activate(up, bias, gate)  # [S, B, F/tp]
        if drops is None or drops.key is None:
            return y
        return dropout(y, drops.p, replace(drops.key, tokens=drops.key.tokens.t()), self.feature_offset)

    def _activate(self, up: Tensor, bias: Tensor | None, gate: Tensor | None) -> Tensor:
        if gate is not None and self.gate_activation is not None and self.gating is not None:
            return glu(gate, up, activation=self.gate_activation, offset=self.gating.offset, clamp=self.gating.clamp)
        return plain_activation(up, self.activation, bias)


def plain_activation(x: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """Applies ``activation``, one without a gate, elementwise; a form of gelu to ``x + bias``, with ``bias`` [F]."""
    assert bias is None or activation in _APPROXIMATE, "the linear layer adds the bias of other activations"
    if activation == "relu":
        return torch.relu(x)
    if activation == "squared_relu":
        return weighted_squared_relu_impl(x, x.new_ones(()).expand(*x.shape[:-1], 1))
    return bias_gelu_impl(x, bias, approximate=_APPROXIMATE[activation])
