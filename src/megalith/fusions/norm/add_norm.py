"""Adds a layer's output to the residual and normalizes the sum, in one pass each for forward and backward.

    h = residual + dropout(x + input_bias);   y = norm(h)

h is the next residual and is also what backward needs, so it is stored once. Backward takes the gradients of both;
without dropout it writes a single gradient for x and residual. Formulas and sources: see ``norm.paths``.
Lower bound: 4TH elements in forward and 4TH in backward, 5TH with dropout; saved: h and 4 or 8 bytes per token.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Unpack

import torch
from torch import Tensor, nn

from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.dropout_mask import mask_operands
from megalith.fusions.core.registry import registered
from megalith.fusions.norm.formulas import (
    Normalization,
    Norming,
    Options,
    as_stored,
    float_gain,
    reference,
    summed,
)
from megalith.fusions.norm.paths import PATHS_OF_SUM, check
from megalith.numerics.dropout import Dropout
from megalith.torch_compat.tensors import any_requires_grad, forward_mode_is_on

__all__ = ["FUSION", "fused_add_norm"]


def fused_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalization: Normalization,
    eps: float = 1e-5,
    zero_centered: bool = False,
    input_bias: Tensor | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of ``residual + dropout(x + input_bias)``, and that sum, which is the next residual.

    Args:
        x: [..., H], floating point: the output of a layer.
        residual: [..., H]; its dtype may be wider than that of ``x``.
        weight: [H], the gain; None for 1.
        bias: [H], for LayerNorm only.
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean square.
        zero_centered: the gain is 1 + weight, computed in float32.
        input_bias: [H], added to ``x`` before dropout: the bias of the linear layer that computed it.
        dropout: applied to ``x``; None for no dropout.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        y [..., H] in the dtype of ``x``, and the sum [..., H] in that of ``residual``. y is the norm of the rounded
        sum, as in an addition followed by a norm.

    Raises:
        ShapeError: the tensors, or the token ids, do not fit together.
        ConfigError: a negative eps, a bias for RMSNorm, an unknown normalization.
        BackendError: ``backend`` cannot run on ``x``.
    """
    check(x, weight, bias, eps, normalization, zero_centered)
    check_floating(residual=residual, input_bias=input_bias)
    check_one_device(x=x, residual=residual, input_bias=input_bias)
    check_shape("residual", residual, x.shape, "like x")
    check_shape("input_bias", input_bias, x.shape[-1:], "one for each feature of x")
    compute = FUSION.path(residual if residual.dtype == torch.float64 else x, backend)
    p = 0.0 if dropout is None else float(dropout.p)
    words, tokens, site = mask_operands(dropout.key, x) if dropout is not None and p else (None, None, 0)
    rows = (x, residual)
    if compute in _OF_ANY_SHAPE:
        single = x.dim() == 1 and words is not None  # dropout masks need a row dimension
        rows = (x[None], residual[None]) if single else (_as_one_matrix(x), _as_one_matrix(residual))
    # no views here: h is saved for backward, and autograd must notice if the caller writes into it
    y, h, *_ = compute(
        *rows, weight, bias, input_bias, words, tokens, site, p, float(eps), normalization, zero_centered
    )
    return (y, h) if y.dim() == x.dim() else (y[0], h[0])


def _as_one_matrix(x: Tensor) -> Tensor:
    """``x`` [..., H] in a memory layout for which torch computes the same as for rows [T, H]."""
    return x if x.dim() == 2 or x.is_contiguous() else x.contiguous()


def _torch_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    *options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """The norm and the sum: torch's operator, applied to the rounded sum in float32 or wider."""
    mask, eps, normalization, zero_centered = Norming.of(*options)
    plain = input_bias is None and mask.key is None and normalization == "RMSNorm" and not zero_centered
    if plain and _rounds_alike(x, residual, weight):
        h = x + residual
        return nn.functional.rms_norm(h, h.shape[-1:], weight, eps).to(x.dtype), h  # autocast on GPUs returns float32
    total = summed(x, residual, input_bias, mask)
    h, H = as_stored(total, residual.dtype), total.shape[-1:]
    gain = None if weight is None else float_gain(h, weight, zero_centered)
    if normalization == "RMSNorm":
        y = nn.functional.rms_norm(h, H, gain, eps)
    else:
        y = nn.functional.layer_norm(h, H, gain, None if bias is None else bias.to(h.dtype), eps)
    return y.to(x.dtype), total.to(residual.dtype)


def _rounds_alike(x: Tensor, residual: Tensor, weight: Tensor | None) -> bool:
    """Whether torch's addition and its norm each round once, to the common dtype.

    If a gradient is recorded, torch's backward would also round between the two.
    """
    return (
        x.dtype == residual.dtype
        and (weight is None or weight.dtype == x.dtype)
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any_requires_grad(x, residual, weight))
        and not forward_mode_is_on()
    )


_OF_ANY_SHAPE = (_torch_add_norm, reference)  # these are plain torch
FUSION = registered(
    Fusion(
        "add_norm",
        {**PATHS_OF_SUM, "aten": _torch_add_norm},
        whole="aten",
        defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")},
    )
)
