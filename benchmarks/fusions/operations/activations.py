"""Gated linear units, GELU with a bias, squared ReLU."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fusions import cost
from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions

__all__ = ["OPERATIONS"]

_F = 4096  # columns; large, while leaving many rows


def _packed(num_bytes: int, dtype: torch.dtype, device: str, *, bias: bool = False, weights: bool = False) -> Inputs:
    T = max(1, num_bytes // (2 * _F * dtype.itemsize))
    made: Inputs = {"x": torch.randn(T, 2 * _F, device=device).to(dtype)}
    if bias:
        made["bias"] = torch.randn(2 * _F, device=device).to(dtype)
    if weights:
        made["weights"] = torch.rand(T, 1, device=device)
    return made


def _eager_glu(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, *, activate: Call) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    y = activate(gate) * up
    return y if weights is None else (y * weights).to(x.dtype)


class _Float8(torch.autograd.Function):
    """SwiGLU that saves its input in 8 bits, as written in plain torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).float() / 448.0
        ctx.save_for_backward((x / scale).to(torch.float8_e4m3fn), scale)
        return _eager_glu(x, activate=functional.silu)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        stored, scale = ctx.saved_tensors
        gate, up = (stored.float() * scale).chunk(2, dim=-1)
        da = torch.ops.aten.silu_backward(dy * up, gate)
        return torch.cat((da, dy * functional.silu(gate)), dim=-1).to(dy.dtype)


def _liger_swiglu() -> Call:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda x: LigerSiLUMulFunction.apply(*(half.contiguous() for half in x.chunk(2, dim=-1)))


def _liger_geglu() -> Call:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return lambda x: LigerGELUMulFunction.apply(*(half.contiguous() for half in x.chunk(2, dim=-1)))


def _megatron_swiglu() -> Call:
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return lambda x, bias=None: bias_swiglu_impl(x, bias)


def _megatron_weighted_swiglu() -> Call:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    return lambda x, weights: weighted_bias_swiglu_impl(x, None, weights)


def _megatron_geglu() -> Call:
    from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl

    return lambda x, bias=None: bias_geglu_impl(x, bias)


def _megatron_squared_relu() -> Call:
    from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl

    return weighted_squared_relu_impl


def _megatron_gelu() -> Call:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    return bias_gelu_impl


def _glu(name: str, activation: str, activate: Call, peers: dict[str, Any], **given: bool) -> Operation:
    return Operation(
        name,
        "glu",
        partial(_packed, **given),
        partial(fusions.glu, activation=activation),
        partial(_eager_glu, activate=activate),
        cost.glu,
        peers,
    )


def _one(num_bytes: int, dtype: torch.dtype, device: str, *, second: str | None) -> Inputs:
    T = max(1, num_bytes // (_F * dtype.itemsize))
    made: Inputs = {"input": torch.randn(T, _F, device=device).to(dtype)}
    if second is not None:
        per_token = second == "weights"
        made[second] = torch.rand(T, 1, device=device) if per_token else torch.randn(_F, device=device).to(dtype)
    return made


_tanh_gelu = partial(functional.gelu, approximate="tanh")

OPERATIONS = [
    _glu("swiglu", "silu", functional.silu, {"Liger": _liger_swiglu, "Megatron": _megatron_swiglu}),
    _glu("swiglu, bias", "silu", functional.silu, {"Megatron": _megatron_swiglu}, bias=True),
    _glu("swiglu, weights", "silu", functional.silu, {"Megatron": _megatron_weighted_swiglu}, weights=True),
    _glu("geglu", "gelu_tanh", _tanh_gelu, {"Liger": _liger_geglu, "Megatron": _megatron_geglu}),
    Operation(
        "swiglu, kept in 8 bits",
        "glu_float8",
        _packed,
        partial(fusions.glu_float8, activation="silu"),
        lambda x: _Float8.apply(x),  # apply takes no keyword arguments
        cost.glu_float8,
        judged=False,  # its gradients are taken at the rounded input
    ),
    Operation(
        "bias gelu",
        "bias_gelu",
        partial(_one, second="bias"),
        fusions.bias_gelu_impl,
        lambda input, bias: _tanh_gelu(input + bias),
        cost.bias_gelu,
        {"Megatron": _megatron_gelu},
    ),
    Operation(
        "bias gelu, exact",
        "bias_gelu",
        partial(_one, second="bias"),
        partial(fusions.bias_gelu_impl, approximate="none"),
        lambda input, bias: functional.gelu(input + bias),
        cost.bias_gelu,
    ),
    Operation(
        "gelu, exact",
        "exact_gelu_16_bit",
        partial(_one, second=None),
        partial(fusions.bias_gelu_impl, bias=None, approximate="none"),
        functional.gelu,
        cost.bias_gelu,
    ),
    Operation(
        "weighted squared relu",
        "weighted_squared_relu",
        partial(_one, second="weights"),
        fusions.weighted_squared_relu_impl,
        lambda input, weights: (functional.relu(input).square() * weights).to(input.dtype),
        cost.weighted_squared_relu,
        {"Megatron": _megatron_squared_relu},
    ),
]
