"""The default matrix product of linear layers: torch's, or one equal to it bit by bit that is faster on some CPUs.

    y = x W^T + b        dx = dy W        dW = dy^T x        db = sum of dy over the rows

Bfloat16 on a CPU with instructions for it: torch copies b to every row of y, and oneDNN adds the product to that. Here
oneDNN adds b itself, before it rounds. Float16 and float32 gain nothing from that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from megalith.torch_compat import (
    below_autograd,
    forward_mode_is_on,
    is_intercepted,
    linear_in_onednn,
    multiplies_natively,
)

__all__ = ["is_plain", "linear"]

_SMALLEST_OUTPUT = 2**20  # elements; with fewer, a Function in Python costs more than oneDNN gains


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x [..., in] by the transpose of ``weight`` [out, in] and adds ``bias`` [out] -> [..., out]."""
    if bias is not None and _onednn_adds(bias, x, weight):
        y: Tensor = _BiasInProduct.apply(x, weight, bias)
        return y
    return nn.functional.linear(x, weight, bias)


def is_plain(product: Callable[..., Tensor]) -> bool:
    """Returns whether ``product`` is the default or torch's own, which equals it."""
    return product in (linear, nn.functional.linear)


class _BiasInProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with below_autograd():
            return linear_in_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])  # [T, out]
        dx = (rows @ weight).view_as(x) if needs_dx else None
        dw = rows.t() @ x.view(rows.shape[0], -1) if needs_dw else None
        return dx, dw, rows.sum(0) if needs_db else None


def _onednn_adds(bias: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can add the bias, gains by it, and no mode or transformation acts on torch's own operator."""
    return (
        x.dtype == weight.dtype == bias.dtype == torch.bfloat16
        and x.device.type == weight.device.type == bias.device.type == "cpu"
        and x.shape[:-1].numel() * weight.shape[0] >= _SMALLEST_OUTPUT
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1] > 0
        and bias.shape == weight.shape[:1]
        and x.is_contiguous()  # torch multiplies other layouts without the bias, and rounds twice
        and weight.is_contiguous()
        and bias.is_contiguous()
        and all(type(each) in (Tensor, Parameter) for each in (x, weight, bias))
        and not torch.is_autocast_enabled("cpu")
        and not is_intercepted()
        and not forward_mode_is_on()
        and multiplies_natively(torch.bfloat16)
    )
