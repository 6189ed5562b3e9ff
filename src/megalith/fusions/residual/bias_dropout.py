"""Bias, dropout and residual in one pass; the mask is recomputed in backward and never stored.

    y         = residual + (x + bias) * m        m = keep / (1 - p), keep with probability 1 - p
    dx        = dy * m
    dbias     = sum over T of dx
    dresidual = dy, the same tensor; likewise dx if p = 0 and x has the dtype of residual

The mask is that of ``megalith.numerics.dropout``: a Philox word for each pair of token and feature, so that it does not
depend on the layout of ranks, the path, or recomputation. Srivastava et al. 2014, "Dropout".

T tokens (leading dimensions flattened), H hidden size. Saved for backward: the key, 8 bytes, and token ids, 8T bytes.
Lower bound: forward 3TH elements, backward 2TH (none at p = 0; TH for dbias alone), and 8T bytes of token ids each.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.fusions.core.checks import check_floating, check_one_device, check_rows, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.dropout_mask import Mask, mask_operands
from megalith.fusions.core.registry import registered
from megalith.fusions.residual.formulas import blocked, compiled, reference
from megalith.numerics.dropout import DropoutKey

__all__ = [
    "FUSION",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_unfused",
    "get_bias_dropout_add",
]

XWithBias = tuple[Tensor, Tensor | None]


def bias_dropout_add_fused_train(
    x_with_bias: XWithBias,
    residual: Tensor,
    prob: float,
    *,
    key: DropoutKey | None = None,
    feature_offset: int = 0,
    backend: Backend | None = None,
) -> Tensor:
    """Returns ``residual + dropout(x + bias)``.

    Args:
        x_with_bias: x [..., H] and bias [H] or None, as returned by a linear layer that skips its bias addition.
        residual: [..., H]; x and bias are cast to its dtype if it is wider, so a float32 residual stream stays float32.
        prob: probability of dropping an element, in [0, 1).
        key: determines the mask: seed, step, site, and one token id per row, in the shape of x without its last
            dimension. By default a key is drawn from torch's generator for the device, and row numbers are the token
            ids: torch.manual_seed then reproduces the mask and ``torch.utils.checkpoint`` recomputes it, but the mask
            depends on the layout of ranks, and ranks with equal generator states have equal masks.
        feature_offset: index of this rank's first feature, for a tensor-parallel shard.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., H] in the dtype of ``residual``.

    Raises:
        ShapeError: the tensors, or the token ids, do not fit together.
        ConfigError: a probability outside [0, 1), or a negative offset.
        BackendError: ``backend`` cannot run on ``x``.
    """
    x, bias = x_with_bias
    _check(x, bias, residual, prob, feature_offset)
    compute = FUSION.path(x if x.dtype == torch.float64 else residual, backend)
    words, tokens, site = mask_operands(key, x) if prob else (None, None, 0)
    return compute(x, bias, residual, words, tokens, site, float(prob), feature_offset)


def bias_dropout_add_fused_inference(
    x_with_bias: XWithBias, residual: Tensor, prob: float, *, backend: Backend | None = None
) -> Tensor:
    """Returns ``residual + x + bias`` without dropout; ``prob`` is checked but not used.

    Shapes, dtypes and errors are those of ``bias_dropout_add_fused_train``. It never works in place, even without grad.
    """
    _check(*x_with_bias, residual, prob, 0)
    return bias_dropout_add_fused_train(x_with_bias, residual, 0.0, backend=backend)


def bias_dropout_add_unfused(training: bool) -> Callable[..., Tensor]:
    """Returns the same operation with ``backend="reference"``: plain torch, with the same mask and numerics."""
    return partial(bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference, backend="reference")


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Returns the function of ``(x_with_bias, residual, prob)``; for training it also takes the keyword arguments."""
    if not fused:
        return bias_dropout_add_unfused(training)
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


def _triton(x: Tensor, bias: Tensor | None, residual: Tensor, *mask: Unpack[Mask]) -> Tensor:
    from megalith.fusions.residual.kernels.bias_dropout import op

    return op(x, bias, residual, *mask)


_PATHS: Mapping[Backend, Callable[..., Tensor]] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("bias_dropout_add", _PATHS, defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")}))


def _check(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, feature_offset: int) -> None:
    if not 0.0 <= prob < 1.0:
        raise ConfigError(f"prob must be in [0, 1), the fraction of elements to drop; got {prob}")
    if feature_offset < 0:
        raise ConfigError(
            f"feature_offset must be 0 or more, the index of this rank's first feature; got {feature_offset}"
        )
    check_floating(x=x, bias=bias, residual=residual)
    check_one_device(x=x, bias=bias, residual=residual)
    check_rows("x", x, "H")
    check_shape("residual", residual, x.shape, "like x")
    check_shape("bias", bias, x.shape[-1:], "one for each feature of x")
