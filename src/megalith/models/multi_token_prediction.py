"""Multi-token prediction: modules that each predict one token further ahead.

They add training objectives; logits do not depend on them, so generation does not run them.

For depths k = 1 ... M, at position i, where t are tokens and E is the embedding of the model,

    x_k = W_k [enorm_k(E[t_(i+k)]), hnorm_k(h_(k-1))]        W_k [H, 2H]
    h_k = norm_k(layer_k(x_k))                               layer_k(x_k) with post-norm layers

and the output head of the model predicts t_(i+k+1) from h_k; h_0 is its input for t_(i+1). Attention is causal over
positions i, so the rotary positions and documents are those of the model's layers.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2. As in its released weights, the
embedding comes first in the concatenation, and h_0 has passed through the final norm. The modules are stored after the
model's last layer, under the next layer indices, with the names of those weights: ``model.layers.61.eh_proj.weight``.
"""

import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import ReplicatedLinear
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.normalization import Normalization

__all__ = ["MultiTokenPrediction", "without_modules"]


class MultiTokenPrediction(TransformerLayer):
    """The module of one depth: a transformer layer built from ``spec``, and the projection that joins its inputs."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, spec: LayerSpec) -> None:
        super().__init__(config, options, spec)
        H = config.hidden_size
        self.enorm = spec.norm(config, options)
        self.hnorm = spec.norm(config, options)
        self.eh_proj = ReplicatedLinear(2 * H, H, options, std=config.init_method_std)
        # takes the place of the model's final norm
        has_norm = config.residual.norm_placement != "post"
        self.shared_head = nn.ModuleDict({"norm": Normalization(config, options)} if has_norm else {})

    def forward(self, embedded: Tensor, hidden: Tensor, context: LayerContext) -> Tensor:  # type: ignore[override]
        """[S, B, H] of the tokens ahead and of the previous depth -> [S, B, H], the input of the output head.

        All are [S/tp, B, H] under sequence parallelism.
        """
        x: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x = super().forward(x.to(embedded.dtype), context)  # the residual stream may be wider than the product's dtype
        for norm in self.shared_head.values():
            x = norm(x)
        return x


def without_modules(config: TransformerConfig) -> TransformerConfig:
    """Returns the config without multi-token prediction modules; the model has the same logits."""
    return config.model_copy(update={"mtp": None})
