"""Quantization, and AdamW's update of all weights."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions.operation import Inputs, Operation
from megalith import fusions

__all__ = ["OPERATIONS"]

_H, _E4M3 = 4096, 448.0


def _matrix(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    return {"x": torch.randn(max(1, num_bytes // (_H * dtype.itemsize)), _H, device=device).to(dtype)}


def _ours(x: Tensor, *, kind: str, backend: str | None = None) -> tuple[Tensor, ...]:
    quantized = fusions.quantize(x.detach(), kind, backend=backend)
    return quantized.values, quantized.scale


def _eager(x: Tensor, *, group: int) -> tuple[Tensor, ...]:
    """One scale for each ``group`` of columns."""
    wide = x.detach().float().view(len(x), -1, group)
    scale = wide.abs().amax(dim=-1, keepdim=True) / _E4M3
    values = (wide / scale).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
    return values.view(x.shape), scale.squeeze(-1)


def _weights(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    """Sixteen float32 weights of one size, their gradients and moments."""
    shape = (16, max(1, num_bytes // 64))
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    return {name: list(torch.rand(shape, device=device).unbind()) for name in names}


def _our_update(backend: str | None = None, **lists: Any) -> None:
    fusions.fused_adamw_(
        lists["params"], None, lists["grads"], lists["exp_avgs"], lists["exp_avg_sqs"],
        lr=1e-4, weight_decay=0.1, step=10, backend=backend,
    )  # fmt: skip


def _torch_update(params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]) -> None:
    steps = [torch.tensor(10.0, device=params[0].device) for _ in params]
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


OPERATIONS = [
    Operation("quantize, row", "quantize", _matrix, partial(_ours, kind="row"), partial(_eager, group=_H)),
    Operation("quantize, block128", "quantize", _matrix, partial(_ours, kind="block128"), partial(_eager, group=128)),
    Operation("AdamW", "adamw", _weights, _our_update, _torch_update, typed=False),
]
