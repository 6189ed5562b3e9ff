"""Experts that process every token, computed as one MLP as wide as all of them, with an optional gate.

y = sigmoid(x g^T) mlp(x), or mlp(x) without the gate

DeepSeek-AI 2024, "DeepSeekMoE", arXiv:2401.06066. The gate: Qwen1.5-MoE, 2024.
"""

import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import ReplicatedLinear
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.mlp import MLP

__all__ = ["SharedExpertMLP"]


class SharedExpertMLP(MLP):
    """The shared experts of a layer; their weights are dense and split over tp like those of an MLP."""

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        moe = config.moe
        assert moe is not None, "only built for models with model.moe"
        super().__init__(config, options, ffn_hidden_size=moe.shared_ffn_hidden_size)
        self.gate: ReplicatedLinear | None = None
        if moe.shared_expert_gate:
            self.gate = ReplicatedLinear(config.hidden_size, 1, options, std=config.init_method_std)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]."""
        y = super().forward(x, context)
        return y if self.gate is None else torch.sigmoid(self.gate(x)) * y
