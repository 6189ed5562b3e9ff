"""Multi-token prediction: modules that each predict one token further ahead.

They make training look further; logits, and so generation, do not depend on them and run none.

For depths k = 1 ... M, at position i, where t are tokens and E is the embedding of the model,

    x_k = W_k [enorm_k(E[t_(i+k)]), hnorm_k(h_(k-1))]        W_k [H, 2H]
    h_k = norm_k(layer_k(x_k))                               layer_k(x_k) where layers end in a norm (post)

and the output head of the model predicts t_(i+k+1) from h_k; h_0 is what it predicts t_(i+1) from. Attention is causal
over positions i, so that the rotary positions and documents are those of the model's layers.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2. As in its released weights, the
embedding comes first in the concatenation, and h_0 has passed the final norm. Modules lie among the model's layers,
under the indices that follow, with the names of those weights: ``model.layers.61.eh_proj.weight``.
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
    """The module of one depth: a layer of the parts that ``spec`` names, and what joins its two inputs."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, spec: LayerSpec) -> None:
        super().__init__(config, options, spec)
        H = config.hidden_size
        self.enorm = spec.norm(config, options)
        self.hnorm = spec.norm(config, options)
        self.eh_proj = ReplicatedLinear(2 * H, H, options, std=config.init_method_std)
        # the last norm has the place of the model's own
        has_norm = config.residual.norm_placement != "post"
        self.shared_head = nn.ModuleDict({"norm": Normalization(config, options)} if has_norm else {})

    def forward(self, embedded: Tensor, hidden: Tensor, context: LayerContext) -> Tensor:  # type: ignore[override]
        """[S, B, H] of the tokens ahead and of the depth before -> [S, B, H], which the output head reads.

        Each is [S/tp, B, H] under sequence parallelism.
        """
        x: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x = super().forward(x.to(embedded.dtype), context)  # the residual stream may be wider than products
        for norm in self.shared_head.values():
            x = norm(x)
        return x


def without_modules(config: TransformerConfig) -> TransformerConfig:
    """The same model without its modules: it has the same logits."""
    return config.model_copy(update={"mtp": None})
