"""Bias, dropout and residual."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fusions import cost
from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions

__all__ = ["OPERATIONS"]

_H = 4096


def _inputs(num_bytes: int, dtype: torch.dtype, device: str, *, bias: bool) -> Inputs:
    T = max(1, num_bytes // (_H * dtype.itemsize))
    x, residual = (torch.randn(T, _H, device=device).to(dtype) for _ in range(2))
    return {"x": x, "bias": torch.randn(_H, device=device).to(dtype) if bias else None, "residual": residual}


def _ours(x: Tensor, bias: Tensor | None, residual: Tensor, *, prob: float, backend: str | None = None) -> Tensor:
    return fusions.bias_dropout_add_fused_train((x, bias), residual, prob, backend=backend)


def _eager(x: Tensor, bias: Tensor | None, residual: Tensor, *, prob: float) -> Tensor:
    return functional.dropout(x if bias is None else x + bias, prob, training=True) + residual


def _megatron(prob: float) -> Call:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    compute = get_bias_dropout_add(training=True, fused=True)
    return lambda x, bias, residual: compute((x, bias), residual, prob)


def _operation(name: str, prob: float, bias: bool) -> Operation:
    return Operation(
        name,
        "bias_dropout_add",
        partial(_inputs, bias=bias),
        partial(_ours, prob=prob),
        partial(_eager, prob=prob),
        partial(_cost, prob=prob),
        {"Megatron": partial(_megatron, prob)},
        judged=prob == 0.0,
    )


def _cost(x: Tensor, bias: Tensor | None, residual: Tensor, *, prob: float) -> cost.Cost:
    return cost.bias_dropout_add(x, residual, bias=bias, p=prob)


OPERATIONS = [
    _operation("bias + residual, no dropout", 0.0, bias=True),
    _operation("bias + dropout + residual", 0.1, bias=True),
    _operation("dropout + residual", 0.1, bias=False),
]
