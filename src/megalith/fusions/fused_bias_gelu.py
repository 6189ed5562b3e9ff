"""GELU of an input with its bias; the bias has its gradient in the same pass.

    a     = x + bias
    y     = gelu(a)         a s(2 u), u = sqrt(2/pi) (a + 0.044715 a^3), in the tanh form; a Phi(a) in the exact one
    dx    = dy * gelu'(a)
    dbias = sum over T of dx

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415; s = sigmoid, Phi the cumulative
normal distribution. The tanh form is that of GPT-2.

T tokens (leading dimensions flattened), F ffn hidden size. Saved for backward: x and bias.
Floor: forward 2TF elements, backward 3TF.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.formulas.activations import activate, activate_and_back
from megalith.fusions.formulas.checks import check_floating, check_one_device, check_shape
from megalith.fusions.formulas.rows import as_rows, in_shape, wide
from megalith.fusions.paths.backend import Backend, Fusion, compiled
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import gradients_like, register

__all__ = [
    "FUSION",
    "Approximate",
    "GeLUFunction",
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "gradients",
    "outputs",
]

Approximate = Literal["tanh", "none"]
_ACTIVATIONS = {"tanh": "gelu_tanh", "none": "gelu"}


def bias_gelu_impl(
    input: Tensor, bias: Tensor | None, *, approximate: Approximate = "tanh", backend: Backend | None = None
) -> Tensor:
    """``gelu(input + bias)``, by default in the tanh form.

    Args:
        input: [..., F], floating; rows may be strided.
        bias: [F], or None.
        approximate: "tanh", or "none" for the exact form, which differs by up to 5e-4: part of what is computed.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        [..., F] in the dtype of ``input``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: an unknown form.
        BackendError: ``backend`` cannot run on ``input``.
    """
    activation = _check(input, bias, approximate)
    compute = FUSION.path(input, backend)
    return in_shape(compute(as_rows(input), bias, activation), input.shape)


class GeLUFunction:
    """``apply`` is ``bias_gelu_impl``, under the name that the field knows."""

    apply = staticmethod(bias_gelu_impl)


def bias_gelu(bias: Tensor | None, y: Tensor, *, approximate: Approximate = "tanh") -> Tensor:
    """Reference forward of ``y`` [..., F], the bias first; in the dtype of ``y``."""
    return _reference(y, bias, _check(y, bias, approximate))


@torch.no_grad()
def bias_gelu_back(g: Tensor, bias: Tensor | None, y: Tensor, *, approximate: Approximate = "tanh") -> Tensor:
    """Reference backward: the gradient of ``y`` [..., F], of the upstream ``g``; that of ``bias`` is its sum.

    It is numbers: nothing is differentiated through it.
    """
    activation = _check(y, bias, approximate)
    check_shape("g", g, y.shape, "as y")
    return _gradient(g, y, bias, activation).to(y.dtype)


def _reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return activate(_biased(x, bias), activation).to(x.dtype)


def _gradient(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """dx, not yet rounded."""
    a = _biased(x, bias)
    _, dx = activate_and_back(dy.to(a.dtype), a, activation)
    return dx


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    acc = wide(x.dtype)
    return x.to(acc) if bias is None else x.to(acc) + bias.to(acc)


def _blocked_forward(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = outputs(x)
    by_blocks(lambda x: (activate(_biased(x, bias), activation),), (x,), (y,))
    return y


def _blocked_backward(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    dx, dbias = gradients(dy, x, bias)
    total = dbias.zero_().to(wide(dbias.dtype))

    def formula(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        dx = _gradient(dy, x, bias, activation)
        return (dx,) if bias is None else (dx, dx.sum(dim=0))

    by_blocks(formula, (dy, x), (dx,), () if bias is None else (total,))
    return dx, total.to(dbias.dtype)


def outputs(x: Tensor, *_: Any) -> Tensor:
    """Memory for y [T, F]."""
    return x.new_empty(x.shape)


def gradients(dy: Tensor, x: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """Memory for dx [T, F] and dbias [F], which is empty without a bias."""
    dx, dbias = gradients_like(x, bias)
    return dx, dbias


_blocked = register(
    "bias_gelu_blocked",
    _blocked_forward,
    outputs,
    _blocked_backward,
    gradients,
    gradients_of=("x", "bias"),
    opaque=True,
)


def _triton(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    from megalith.fusions.kernels.bias_gelu import op

    return op(x, bias, activation)


_PATHS: Mapping[Backend, Callable[[Tensor, Tensor | None, str], Tensor]] = {
    "triton": _triton,
    "compile": compiled(_reference),
    "blocked": _blocked,
    "reference": _reference,
}
FUSION = Fusion("bias_gelu", _PATHS)


def _check(input: Tensor, bias: Tensor | None, approximate: str) -> str:
    """The activation that ``approximate`` stands for."""
    if approximate not in _ACTIVATIONS:
        raise ConfigError(f'approximate must be "tanh" or "none"; got {approximate!r}')
    check_floating(input=input, bias=bias)
    check_one_device(input=input, bias=bias)
    if input.dim() == 0:
        raise ShapeError("input must be [..., F]; got a tensor without dimensions")
    check_shape("bias", bias, input.shape[-1:], "one for each column of input")
    return _ACTIVATIONS[approximate]
