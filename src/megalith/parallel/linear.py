"""The default matrix product of linear layers: torch's, or one by oneDNN that is faster on some CPUs.

    y = x W^T + b        dx = dy W        dW = dy^T x        db = sum of dy over the rows

Bfloat16 on a CPU with instructions for it: torch copies b to every row of y, and oneDNN adds the product to that. Here
oneDNN adds b itself, before it rounds; the result is torch's bit by bit. Float16 and float32 gain nothing from that.

Float32 on an AMD CPU of the generation of Zen 5: torch takes MKL's products, which do not use AVX-512 there. oneDNN's
do: 2 to 2.5 times the rate for y and dx, 1.4 to 2.2 times for dW, on two cores and for 32 to 8,192 features. Only dW
of 128 x 128 or less is slower than MKL's (0.7 to 0.9); the three together are always faster. Their sums are in another
order, so the result differs from torch's in the last bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from megalith.torch_compat.tensors import (
    below_autograd,
    forward_mode_is_on,
    is_intercepted,
    linear_in_onednn,
    multiplies_natively,
)

__all__ = ["MatrixProduct", "input_gradient", "is_plain", "linear", "products_of_backward", "weight_gradient"]

# (x [..., in], weight [out, in], bias [out] or None) -> [..., out]: what every linear layer computes
MatrixProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_SMALLEST_OUTPUT = 2**20  # elements; with fewer, a Function in Python costs more than oneDNN gains
_FEWEST_PRODUCTS = 2**26  # of float32 numbers; with fewer, the same


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x [..., in] by the transpose of ``weight`` [out, in] and adds ``bias`` [out] -> [..., out]."""
    product = _ByOneDNN.apply if _takes_onednn(x, weight, bias) else nn.functional.linear
    y: Tensor = product(x, weight, bias)
    return y


def products_of_backward(x: Tensor, weight: Tensor, bias: Tensor | None) -> MatrixProduct:
    """Returns what multiplies in the backward of ``linear(x, weight, bias)``, for the two functions below."""
    return linear if _takes_onednn(x, weight, bias) else nn.functional.linear


def input_gradient(dy: Tensor, weight: Tensor, product: MatrixProduct) -> Tensor:
    """Multiplies dy [..., out] by ``weight`` [out, in] -> dx [..., in].

    As one matrix of rows: torch multiplies a batch that is not contiguous matrix by matrix, and may round otherwise.
    """
    return product(_rows(dy), weight.t(), None).view(*dy.shape[:-1], weight.shape[1])


def weight_gradient(dy: Tensor, x: Tensor, product: MatrixProduct) -> Tensor:
    """Multiplies the transpose of dy [..., out] by x [..., in] -> dW [out, in]."""
    dy, x = _rows(dy), _rows(x)
    if product is linear and dy.shape[1] > x.shape[1] and _is_faster_in_onednn(x.t(), dy.t(), None):
        return linear(x.t(), dy.t(), None).t().contiguous()  # faster with the larger size as columns
    return product(dy.t(), x.t(), None)


def is_plain(product: Callable[..., Tensor]) -> bool:
    """Returns whether ``product`` is the default or torch's own, equal up to the order of its sums."""
    return product in (linear, nn.functional.linear)


class _ByOneDNN(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, x, weight)
        with below_autograd():
            return linear_in_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        dx = input_gradient(dy, weight, linear) if needs_dx else None
        dw = weight_gradient(dy, x, linear) if needs_dw else None
        return dx, dw, _rows(dy).sum(0) if needs_db else None


def _save(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Saves what the needed gradients read, as torch does."""
    needs_dx, needs_dw, _ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _takes_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return _onednn_adds(bias, x, weight) or _is_faster_in_onednn(x, weight, bias)


def _onednn_adds(bias: Tensor | None, x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can add the bias, gains by it, and no mode or transformation acts on torch's own operator."""
    return (
        bias is not None
        and x.dtype == torch.bfloat16
        and weight.dim() == 2
        and x.shape[:-1].numel() * weight.shape[0] >= _SMALLEST_OUTPUT
        and x.is_contiguous()  # torch multiplies other layouts without the bias, and rounds twice
        and weight.is_contiguous()
        and _is_for_onednn(x, weight, bias)
        and multiplies_natively(torch.bfloat16)
    )


def _is_faster_in_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN can compute the product and is faster, and no mode or transformation acts on torch's operator."""
    return (
        x.dtype == torch.float32
        and weight.dim() == 2
        and x.numel() * weight.shape[0] >= _FEWEST_PRODUCTS
        and (x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()))
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and _is_for_onednn(x, weight, bias)
        and bool(torch.backends.mkldnn.enabled)
        and _has_slow_mkl()  # last, because torch.compile cannot trace it
    )


def _is_for_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN can multiply by ``weight`` [out, in] on a CPU, and nothing acts on torch's own operator."""
    given = [x, weight, *([] if bias is None else [bias])]
    return (
        all(each.dtype == x.dtype and each.device.type == "cpu" for each in given)
        and x.shape[-1] == weight.shape[1] > 0
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and all(type(each) in (Tensor, Parameter) for each in given)
        and not torch.is_autocast_enabled("cpu")
        and not is_intercepted()
        and not forward_mode_is_on()
    )


def _has_slow_mkl() -> bool:
    """Whether MKL, which torch takes for float32 products, leaves AVX-512 unused: on AMD's CPUs.

    Only those of Zen 5 gain by it, which compute with all 512 bits at once; no earlier one has VP2INTERSECT.
    """
    has = torch.cpu.get_capabilities()
    is_amd = str(has.get("cpu_name", "")).startswith("AMD")
    return is_amd and bool(has.get("avx512_vp2intersect")) and torch.backends.mkl.is_available()
