"""Gated linear units: one formula and one operator behind fused_bias_swiglu and fused_bias_geglu.

    a, l = gate + bias, up + bias       a <= clamp and -clamp <= l <= clamp, if there is a clamp
    y    = act(a) * (l + offset) * w
    da   = dy * w * act'(a) * (l + offset)    where a <= clamp
    dl   = dy * w * act(a)                    where -clamp <= l <= clamp
    dw   = sum over F of dy * act(a) * (l + offset);   dbias = sum over T of da and dl

Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202. Activations: ``core.activations``.

T tokens (leading dimensions flattened), F ffn hidden size. Saved for backward: the input, bias and w; no output.
Lower bound: forward 3TF elements, backward 5TF, and 4T and 8T bytes for w in float32.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, Unpack

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.activations import Activation
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows, in_shape, rows_together
from megalith.fusions.gated.formulas import Gating, Operands, blocked, compiled, reference, reference_back

__all__ = ["FUSION", "back", "check", "glu", "glu_back"]

# the gradient of a tensor is a tensor, that of None is None
Up = TypeVar("Up", Tensor, None, Tensor | None)
Bias = TypeVar("Bias", Tensor, None, Tensor | None)
Weights = TypeVar("Weights", Tensor, None, Tensor | None)


def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Returns ``act(gate) * (up + offset) * weights``, from one packed tensor or from two.

    Args:
        x: the gate [..., F]; or, without ``up``, gate and up [..., 2F], one half after the other.
        up: [..., F], if gate and up come from separate projections.
        activation: applied to the gate; it changes the result, never the path.
        bias: [2F], in the order of a packed ``x``.
        weights: [..., 1], one per token, often float32 while ``x`` is bfloat16: the router's probability.
        offset: added to up after clamping (1 in gpt-oss); not differentiable.
        clamp: upper bound of the gate, and bound of up on both sides, applied after the bias (7 in gpt-oss).
        interleaved: the columns of a packed ``x`` alternate between gate and up, as in Hugging Face's gpt-oss.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., F] in the dtype of ``x``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: an unknown activation, or a clamp that is not positive.
        BackendError: ``backend`` cannot run on ``x``.
    """
    gating = Gating.of(activation, offset, clamp, interleaved)
    check(x, up, bias, weights, interleaved)
    compute = FUSION.path(x, backend)
    rows, up_rows, w = rows_together(x, up, weights)
    y = compute(rows, up_rows, bias, w, *gating)
    return in_shape(y, (*x.shape[:-1], y.shape[-1]))


def glu_back(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Reference backward of ``glu``: dx, dup, dbias and dw, each like its tensor, or None for operands that are None.

    Not differentiable.
    """
    return back(dy, x, up, bias, weights, Gating.of(activation, offset, clamp, interleaved))


@torch.no_grad()
def back(
    dy: Tensor, x: Tensor, up: Up, bias: Bias, weights: Weights, gating: Gating
) -> tuple[Tensor, Up, Bias, Weights]:
    """``glu_back`` with types that relate each gradient to its operand."""
    check(x, up, bias, weights, gating.interleaved)
    check_shape("dy", dy, (*x.shape[:-1], x.shape[-1] // (2 if up is None else 1)), "like the output")
    dx, dup, dbias, dw = reference_back(as_rows(dy), as_rows(x), _rows(up), bias, _rows(weights), *gating)
    return (
        dx.view(x.shape),
        None if up is None else dup.view(up.shape),
        None if bias is None else dbias,
        None if weights is None else dw.view(weights.shape),
    )


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_rows(x)


Glu = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, str, float, float, bool], Tensor]


def _triton(*operands: Unpack[Operands]) -> Tensor:
    from megalith.fusions.gated.kernels.glu import op

    return op(*operands)


def _triton_back(dy: Tensor, *operands: Unpack[Operands]) -> tuple[Tensor, ...]:
    from megalith.fusions.gated.kernels.glu import op

    return op.back(dy, *operands)


_PATHS: Mapping[Backend, Glu] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
_BACKS: Mapping[Backend, Callable[..., tuple[Tensor, ...]]] = {
    "triton": _triton_back,
    "compile": compiled.back,
    "blocked": blocked.back,
    "reference": reference_back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("compile", "blocked")}
FUSION = registered(Fusion("glu", _PATHS, defaults=_DEFAULTS, backs=_BACKS))


def check(x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, interleaved: bool) -> None:
    """Raises ShapeError if the operands do not fit together, ConfigError for ``interleaved`` together with ``up``."""
    check_floating(x=x, up=up, bias=bias, weights=weights)
    check_one_device(x=x, up=up, bias=bias, weights=weights)
    if x.dim() == 0 or (up is None and x.shape[-1] % 2):
        raise ShapeError(f"x must be [..., 2F], gate and up packed, or [..., F] with up [..., F]; got {list(x.shape)}")
    if up is not None and interleaved:
        raise ConfigError("interleaved applies only to a packed x; leave it out when up is given")
    check_shape("up", up, x.shape, "like the gate x")
    check_shape("bias", bias, (x.shape[-1] * (1 if up is None else 2),), "one for each column of gate and up")
    if weights is not None:
        check_shape("weights", weights, (*x.shape[:-1], 1), f"one for each token of x {list(x.shape)}")
