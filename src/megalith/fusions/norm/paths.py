"""The norm family: one formula and one operator behind fused_layer_norm, fused_rms_norm and fused_add_norm.

    h    = residual + m * (x + input_bias) / (1 - p), stored; m the dropout mask. Without a residual, h is x
    mean = sum of h / H for LayerNorm, 0 for RMSNorm;   rstd = (sum of (h - mean)^2 / H + eps)^(-1/2)
    h^   = (h - mean) * rstd;   y = h^ * g + b;         g is w, or 1 + w if the gain is zero-centered
    dh   = rstd * (g dy - h^ mean(h^ g dy) - mean(g dy)) + dh', the last mean for LayerNorm only, dh' upstream of h
    dresidual = dh;   dx = m * dh / (1 - p);   dinput_bias = sum over T of dx
    dw   = sum over T of dy * h^;   db = sum over T of dy

LayerNorm: Ba et al. 2016, arXiv:1607.06450. RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467.

T tokens, H hidden size. Saved for backward: h, w, and the statistics in float32; for dropout a key, never the mask.
Lower bound: a norm reads and writes 2TH elements in forward and 3TH in backward; with a residual, 4TH in each.

The norm is computed from h as stored, so that on one path it equals an addition followed by a norm bit for bit. The
variance is that of centered values: E[h^2] - mean^2 loses all digits if the mean is large. 1 + w is computed in
float32: bfloat16 would keep at most 8 bits of w.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megalith.errors import ConfigError
from megalith.fusions.core.checks import check_floating, check_one_device, check_rows, check_shape
from megalith.fusions.core.dispatch import Backend
from megalith.fusions.norm.blocked import blocked, blocked_of_sum, compiled, compiled_of_sum
from megalith.fusions.norm.formulas import reference

__all__ = ["PATHS", "PATHS_OF_SUM", "Norm", "check"]

# (x, residual, weight, bias, input_bias, key, tokens, site, p, eps, normalization, zero_centered) -> (y, h, ...)
Norm = Callable[..., tuple[Tensor, ...]]


def _triton(*inputs: Any) -> tuple[Tensor, ...]:
    from megalith.fusions.norm.kernels.add_norm import op

    return op(*inputs)


def _triton_of_sum(*inputs: Any) -> tuple[Tensor, ...]:
    from megalith.fusions.norm.kernels.add_norm import op_of_sum

    return op_of_sum(*inputs)


PATHS: Mapping[Backend, Norm] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
PATHS_OF_SUM: Mapping[Backend, Norm] = {
    "triton": _triton_of_sum,
    "compile": compiled_of_sum,
    "blocked": blocked_of_sum,
    "reference": reference,
}


def check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, normalization: str, zero_centered: bool
) -> None:
    """Raises ShapeError or ConfigError unless the arguments fit the rows of ``x`` [..., H] and each other."""
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ConfigError(f"normalization must be 'LayerNorm' or 'RMSNorm'; got {normalization!r}")
    if normalization == "RMSNorm" and bias is not None:
        raise ConfigError("RMSNorm has no bias; leave it out, or use normalization='LayerNorm'")
    if zero_centered and weight is None:
        raise ConfigError(
            "zero_centered makes the gain 1 + weight, but weight is None; pass a weight, or zero_centered=False"
        )
    if not eps >= 0.0:
        raise ConfigError(f"eps must be 0 or more; got {eps}")
    check_floating(x=x, weight=weight, bias=bias)
    check_one_device(x=x, weight=weight, bias=bias)
    check_rows("x", x, "H")
    check_shape("weight", weight, x.shape[-1:], "one for each feature of x")
    check_shape("bias", bias, x.shape[-1:], "one for each feature of x")
