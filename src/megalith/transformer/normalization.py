"""LayerNorm and RMSNorm, with parameters replicated over tp.

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * w                       Zhang and Sennrich 2019, arXiv:1910.07467
    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * w + b          Ba et al. 2016, arXiv:1607.06450

With zero-centered norms the gain is 1 + w, and w is initialized to 0. If the residual stream is in float32, the output
has the dtype of the weights, which is the compute dtype.

Under sequence parallelism a rank sees only its own tokens, so each rank's gradient of w and b is one term of a sum.
"""

from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.fusions import fused_add_norm, fused_rms_norm
from megalith.fusions.fused_layer_norm import fused_layer_norm
from megalith.numerics.dropout import Dropout
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local

__all__ = ["Normalization"]


class Normalization(DeclaringModule):
    """The norm named by ``config.normalization``.

    Args:
        size: the number of features; by default H.
        eps: added before the square root; by default ``config.layernorm_epsilon``.
    """

    weight: nn.Parameter
    bias: nn.Parameter  # LayerNorm only

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, size: int | None = None, eps: float | None = None
    ) -> None:
        super().__init__()
        self.normalization = config.normalization
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.zero_centered = config.residual.zero_centered_norm
        self.reads_fp32 = config.residual.fp32
        self.partial = options.sequence_parallel
        self.normed = DiscardableOutput("layernorm")
        shape = (config.hidden_size if size is None else size,)
        gain = ParameterSpec(shape, "zeros" if self.zero_centered else "ones")
        self.declare("weight", gain, options.pg_collection, options.dtype)
        if self.normalization == "LayerNorm":
            self.declare("bias", ParameterSpec(shape, "zeros"), options.pg_collection, options.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the same dtype, or that of the weights if the residual stream is in float32."""
        y: Tensor = self.normed(self._normalize, x)
        return y

    def after_residual(self, x: Tensor, residual: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of ``residual + dropout(x)`` in the dtype of ``x``, and the sum in that of ``residual``.

        All tensors are [..., H].
        """
        weight, bias = self._parameters_here()
        y, total = fused_add_norm(
            x,
            residual,
            weight,
            bias,
            normalization=self.normalization,
            eps=self.eps,
            zero_centered=self.zero_centered,
            dropout=dropout,
        )
        # y can be recomputed from the stored sum, which is kept for the gradient anyway
        return self.normed.computed(y, self._normalize, total), total

    def _normalize(self, x: Tensor) -> Tensor:
        weight, bias = self._parameters_here()
        if self.normalization == "RMSNorm":
            y = fused_rms_norm(x, weight, self.eps, self.zero_centered)
        else:
            y = fused_layer_norm(x, weight, bias, self.eps, self.zero_centered)
        return y.to(weight.dtype) if self.reads_fp32 else y

    def _parameters_here(self) -> tuple[Tensor, Tensor | None]:
        weight = local(self.weight, partial=self.partial)
        return weight, local(self.bias, partial=self.partial) if self.normalization == "LayerNorm" else None
