"""Gated linear units that save their input for backward in 8 bits: half the memory, and a less accurate gradient.

    y     = glu(x)                                       from the unquantized x
    scale = max over 2F of abs(x) / 448                  one per token
    x'    = float8_e4m3fn(x / scale) * scale
    dx    = the gradient of glu at x'                    dbias and dw too

float8_e4m3fn has a maximum of 448 and 3 mantissa bits, so the largest value of a token uses the full range and nothing
overflows. The error of dx is that of 4 significant bits in x: a relative 3 % where x matters.

T tokens, F ffn hidden size. Saved for backward: 2TF bytes, 4T for scales, and bias and w.
Lower bound: forward 3TF elements and 2TF bytes, backward 3TF elements and 2TF bytes.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from torch import Tensor

from megalith.errors import BackendError
from megalith.fusions.core.activations import Activation
from megalith.fusions.core.dispatch import Backend, Fusion, why_not_forward_mode
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows, in_shape
from megalith.fusions.gated.float8_formulas import Operands, blocked, compiled
from megalith.fusions.gated.formulas import Gating
from megalith.fusions.gated.glu import check

__all__ = ["FUSION", "glu_float8"]


def glu_float8(
    x: Tensor,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """``megalith.fusions.glu`` of a packed ``x`` [..., 2F], saved for backward in float8_e4m3fn with a scale per token.

    Arguments, result and errors are those of ``glu``. It is only once differentiable, on any path, and forward-mode AD
    raises BackendError. Infinite values in ``x`` become NaN in backward, like NaN, without affecting the rest of the
    token.
    """
    gating = Gating.of(activation, offset, clamp, interleaved)
    check(x, None, bias, weights, interleaved)
    if reason := why_not_forward_mode():
        raise BackendError(f"glu_float8 is a custom operator on every path, and {reason}; use glu, in full precision")
    compute = FUSION.path(x, backend)
    y, _, _ = compute(as_rows(x), bias, None if weights is None else as_rows(weights), *gating)
    return in_shape(y, (*x.shape[:-1], y.shape[-1]))


def _triton(*operands: Unpack[Operands]) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.gated.kernels.glu import op_float8

    return op_float8(*operands)


def _triton_back(
    dy: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.gated.kernels.glu import op_float8

    return op_float8.back(dy, stored, scale, bias, weights, *options)


GluFloat8 = Callable[[Tensor, Tensor | None, Tensor | None, str, float, float, bool], tuple[Tensor, Tensor, Tensor]]
# "reference" is the blocked operator: torch's autograd of the formula would save more than the input, unquantized
_PATHS: Mapping[Backend, GluFloat8] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": blocked,
}
_BACKS: Mapping[Backend, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "triton": _triton_back,
    "compile": compiled.back,
    "blocked": blocked.back,
    "reference": blocked.back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("compile", "blocked")}
FUSION = registered(Fusion("glu_float8", _PATHS, defaults=_DEFAULTS, backs=_BACKS))
