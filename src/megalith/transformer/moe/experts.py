"""The experts of a layer: MLPs with weights packed over experts, applied to rows sorted by expert.

gated      y = w (act(x Wg_e^T) * (x Wu_e^T)) Wd_e^T
not gated  y = w act(x Wu_e^T) Wd_e^T

for a row x of expert e with the router's weight w. w is applied before the last product, which is linear, because it
costs least there. Every product may have a bias; that of the last product is multiplied by w too.
"""

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.fusions import bias_gelu_impl, glu, grouped_matmul, weighted_squared_relu_impl
from megalith.fusions.core.dispatch import Backend
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.transformer.initialization import output_std

__all__ = ["GroupedMLP", "SequentialMLP"]


class GroupedMLP(DeclaringModule):
    """E/ep of E experts with F/etp inner features each, computed together.

    Gate and up are one parameter, [E, 2, F, D], and thus one product. D is the size of a dispatched row: H, or the
    size of the latents.
    """

    gate_up_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    backend: Backend | None = None  # of the products

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "only built for models with model.moe"
        E, F, D = moe.num_experts, config.expert_ffn_hidden_size, moe.latent_size or config.hidden_size
        self.activation, self.gate_activation, self.gating = config.activation, config.gate_activation, config.glu
        self.has_bias = config.mlp_bias
        self.entering = "up_proj" if self.gate_activation is None else "gate_up_proj"
        inner = (F,) if self.gate_activation is None else (2, F)

        def declare(name: str, shape: tuple[int, ...], std: float, etp_dim: int) -> None:
            spec = ParameterSpec(shape, "normal" if std else "zeros", std, {"ep": 0, "etp": etp_dim}, "expert")
            self.declare(name, spec, options.pg_collection, options.dtype)

        declare(self.entering, (E, *inner, D), config.init_method_std, len(inner))
        declare("down_proj", (E, D, F), output_std(config), 2)
        if self.has_bias:
            declare(f"{self.entering}_bias", (E, *inner), 0.0, len(inner))
            # each rank of etp adds its columns of the bias to its partial sums
            declare("down_proj_bias", (E, D), 0.0, 1)
        self.etp_rank = options.pg_collection.rank("etp")
        self.activated = DiscardableOutput("moe_act")

    def forward(self, x: Tensor, weights: Tensor, rows_per_expert: Tensor) -> Tensor:
        """Rows [R, D], their weights [R] and int32 [E/ep] -> [R, D]; with etp, partial sums.

        Rows after the last expert's must have weight 0; their output is zero.
        """
        expert = _expert_of_row(rows_per_expert, len(x)) if self.has_bias else None
        weight = local(getattr(self, self.entering)).flatten(1, -2)  # [E/ep, 2F/etp, D], [E/ep, F/etp, D]
        h = grouped_matmul(x, weight, rows_per_expert, backend=self.backend)  # [R, 2F/etp]
        if expert is not None:
            h = h + local(getattr(self, f"{self.entering}_bias")).flatten(1)[expert]
        h = self.activated(self._activate, h, weights.unsqueeze(-1))  # [R, F/etp]
        y = grouped_matmul(h, local(self.down_proj), rows_per_expert, backend=self.backend)  # [R, D]
        if expert is None:
            return y
        bias = local(self.down_proj_bias)[expert] * weights.unsqueeze(-1).to(y.dtype)  # [R, D/etp]
        first = self.etp_rank * bias.shape[1]
        return y + nn.functional.pad(bias, (first, y.shape[1] - first - bias.shape[1]))

    def _activate(self, h: Tensor, weights: Tensor) -> Tensor:
        """[R, 2F/etp] or [R, F/etp], weights [R, 1] -> [R, F/etp]."""
        if self.gate_activation is not None and self.gating is not None:
            gating = self.gating
            return glu(h, activation=self.gate_activation, weights=weights, offset=gating.offset, clamp=gating.clamp)
        if self.activation == "squared_relu":
            return weighted_squared_relu_impl(h, weights)
        if self.activation == "relu":
            return torch.relu(h) * weights.to(h.dtype)
        y = bias_gelu_impl(h, None, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return y * weights.to(h.dtype)


class SequentialMLP(GroupedMLP):
    """The same experts, computed one after the other on any device; a reference for ``GroupedMLP``."""

    backend = "blocked"


def _expert_of_row(rows_per_expert: Tensor, num_rows: int) -> Tensor:
    """Returns int64 [R], the expert of each row; the last expert for unused rows at the end."""
    ends = rows_per_expert.cumsum(0)
    rows = torch.arange(num_rows, device=ends.device)
    return torch.bucketize(rows, ends, right=True).clamp(max=len(ends) - 1)
