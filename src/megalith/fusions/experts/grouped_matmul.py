"""Grouped matrix product: rows sorted by expert, each multiplied by the weight of its expert.

    y[r]  = x[r] weight[e]^T                       for the rows r of expert e; zero for rows after those of all experts
    dx[r] = dy[r] weight[e]
    dw[e] = sum over the rows r of e of dy[r]^T x[r]        zero for an expert without rows

R rows, E experts, H columns of x, F columns of y, as in the first projection of an expert; in the second, H and F are
swapped. Saved for backward: x, the weight and the sizes themselves.
Lower bound: 6RHF operations, 2 forward and 4 backward.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions.core.autocast import without_autocast
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion, Operand, why_not_forward_mode
from megalith.fusions.core.registry import registered
from megalith.fusions.experts.grouped_matmul_formulas import aten, blocked, reference

__all__ = ["FUSION", "grouped_matmul"]

_ATEN_DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.float32, torch.bfloat16, torch.float16)}
_MOST_ATEN_EXPERTS = 1023
_ATEN_BYTES = 16  # torch requires rows of every operand to be a multiple of this


def grouped_matmul(x: Tensor, weight: Tensor, rows_per_expert: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Returns each row of ``x`` times the transposed weight of its expert.

    Autocast has no effect inside: cast ``x`` and ``weight`` yourself.

    Args:
        x: [R, H], floating point, sorted by expert, as returned by ``permute``; rows may be strided.
        weight: [E, F, H], in the dtype of ``x``, with at least one expert.
        rows_per_expert: int32 [E], as in ``RowMap``. Rows beyond its sum are gaps: their results and gradients are
            zero, whatever they contain. Counts beyond R are ignored.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [R, F] in the dtype of ``x``; products are accumulated in float32 (float64 for float64) and rounded once.

    Raises:
        ShapeError: the tensors do not fit together.
        BackendError: ``backend`` cannot run on these dtypes and sizes.
    """
    _check(x, weight, rows_per_expert)
    (R, H), F = x.shape, weight.shape[1]
    compute = FUSION.path(_Sizes(x.device, x.dtype, R, H, F, weight.shape[0]), backend)
    with without_autocast(x):
        return compute(x, weight, rows_per_expert)


class _Sizes(NamedTuple):
    """The properties that determine the path."""

    device: torch.device
    dtype: torch.dtype
    R: int
    H: int
    F: int
    E: int

    def numel(self) -> int:
        return self.R * max(self.H, self.F)


def _why_not_aten(x: Operand) -> str | None:
    kind = x.device.type
    if x.dtype not in _ATEN_DTYPES.get(kind, ()):
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ATEN_DTYPES.get(kind, ()))
        return f"on {kind} torch's operator supports {dtypes or 'no dtype'}; got {x.dtype}"  # or waits for the GPU
    if isinstance(x, _Sizes) and x.E > _MOST_ATEN_EXPERTS:
        return f"torch's operator supports at most {_MOST_ATEN_EXPERTS} experts; got {x.E}"
    if isinstance(x, _Sizes) and any(size * x.dtype.itemsize % _ATEN_BYTES for size in (x.H, x.F)):
        columns = _ATEN_BYTES // x.dtype.itemsize
        return f"torch's operator requires H and F to be multiples of {columns}; got {x.H} and {x.F}"
    return why_not_forward_mode()  # torch's operator is called inside an operator of ours


def _triton(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    from megalith.fusions.experts.kernels.grouped_matmul import op

    return op(x, weight, rows_per_expert)


_PATHS: Mapping[Backend, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "triton": _triton,
    "aten": aten,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(
    Fusion(
        "grouped_matmul",
        _PATHS,
        {"aten": _why_not_aten},
        defaults={"hopper": ("aten", "triton"), "cuda": ("triton",), "cpu": ("aten", "blocked")},
    )
)


def _check(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> None:
    check_floating(x=x, weight=weight)
    check_one_device(x=x, weight=weight, rows_per_expert=rows_per_expert)
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[0] == 0 or weight.shape[2] != x.shape[1]:
        shapes = f"{list(x.shape)} and {list(weight.shape)}"
        raise ShapeError(f"x must be [R, H] and weight [E, F, H], with the same H and E at least 1; got {shapes}")
    if weight.dtype != x.dtype:
        raise ShapeError(f"weight must be {x.dtype}, like x; got {weight.dtype}; cast one of them")
    check_shape("rows_per_expert", rows_per_expert, weight.shape[:1], "one for each expert of weight")
    if rows_per_expert.dtype != torch.int32:
        raise ShapeError(f"rows_per_expert must be int32, as returned by row_map; got {rows_per_expert.dtype}")
