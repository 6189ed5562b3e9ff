"""LayerNorm and RMSNorm, alone and with a residual."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fusions import cost
from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions
from megalith.fusions.fused_layer_norm import fused_layer_norm

__all__ = ["OPERATIONS"]

_H, _EPS = 4096, 1e-5


def _inputs(num_bytes: int, dtype: torch.dtype, device: str, *, names: tuple[str, ...]) -> Inputs:
    T = max(1, num_bytes // (_H * dtype.itemsize))
    made = {name: torch.randn(T, _H, device=device).to(dtype) for name in names if name in ("x", "residual")}
    return made | {name: torch.randn(_H, device=device).to(dtype) for name in names if name not in made}


def _eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return functional.rms_norm(h, (_H,), weight, _EPS), h


def _liger_rms_norm() -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, _EPS, 0.0, "llama", False)


def _liger_layer_norm() -> Call:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, _EPS)


def _liger_add_norm() -> Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, _EPS, 0.0, "llama", False
    )


OPERATIONS = [
    Operation(
        "rms norm",
        "rms_norm",
        partial(_inputs, names=("x", "weight")),
        partial(fusions.fused_rms_norm, eps=_EPS),
        lambda x, weight: functional.rms_norm(x, (_H,), weight, _EPS),
        partial(cost.norm, num_statistics=1),
        {"Liger": _liger_rms_norm},
    ),
    Operation(
        "layer norm",
        "layer_norm",
        partial(_inputs, names=("x", "weight", "bias")),
        partial(fused_layer_norm, eps=_EPS),
        lambda x, weight, bias: functional.layer_norm(x, (_H,), weight, bias, _EPS),
        partial(cost.norm, num_statistics=2),
        {"Liger": _liger_layer_norm},
    ),
    Operation(
        "residual + rms norm",
        "add_norm",
        partial(_inputs, names=("x", "residual", "weight")),
        partial(fusions.fused_add_norm, normalization="RMSNorm", eps=_EPS),
        _eager_add_norm,
        partial(cost.add_norm, num_statistics=1),
        {"Liger": _liger_add_norm},
    ),
]
