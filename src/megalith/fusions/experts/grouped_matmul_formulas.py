"""Implements the formulas stated in ``grouped_matmul``; R rows, E experts, H and F columns.

A path consists of two products: rows times the weights of their experts, which also computes dx, and rows times rows
per expert, which computes dw.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import contiguous_columns, wide
from megalith.optional import has_triton
from megalith.torch_compat.tensors import grouped_mm

__all__ = ["OPERATOR", "aten", "blocked", "reference"]

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
_ALIGNMENT = 16  # bytes; required by torch's operator


def reference(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    """y, computed from all rows times every expert's weight: E times the work, but without a host sync."""
    acc, R = wide(x.dtype), x.shape[0]
    ends = rows_per_expert.cumsum(0)
    row = torch.arange(R, device=x.device)
    rows, y = x.to(acc), x.new_zeros(R, weight.shape[1], dtype=acc)
    for one, end, size in zip(weight.unbind(), ends, rows_per_expert, strict=True):
        mine = ((row >= end - size) & (row < end)).unsqueeze(1)  # [R, 1]
        # other rows are masked before and after: non-finite values would reach dw, or come from the weight
        y = torch.where(mine, rows.masked_fill(~mine, 0.0) @ one.to(acc).t(), y)
    return y.to(x.dtype)


def _outputs(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    """Allocates y [R, F]."""
    return x.new_empty(x.shape[0], weight.shape[1])


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, rows_per_expert: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Allocates dx and dw, empty for those not needed."""
    dx, dweight = (one.new_empty(one.shape if needed else [0]) for one, needed in zip((x, weight), needs, strict=True))
    return dx, dweight


OPERATOR = Operator(_outputs, _gradients, of=("x", "weight"))


def _register(name: str, by_matrices: Product, by_rows: Product) -> Product:
    """Registers the operator given two products of rows sorted by expert, with the sizes [E].

    Args:
        by_matrices: (rows [R, n], matrices [E, n, m], sizes) -> [R, m], zero after the rows of all experts.
        by_rows: (rows [R, m], rows [R, n], sizes) -> [E, m, n], the transpose of the first times the second.
    """

    def forward(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
        if x.numel() == 0 or weight.numel() == 0:
            return OPERATOR.outputs(x, weight, rows_per_expert).zero_()
        return by_matrices(x, weight.transpose(1, 2), rows_per_expert)

    def backward(
        dy: Tensor, x: Tensor, weight: Tensor, rows_per_expert: Tensor, needs: list[bool]
    ) -> tuple[Tensor, Tensor]:
        if x.numel() == 0 or weight.numel() == 0:
            dx, dweight = OPERATOR.gradients(dy, x, weight, rows_per_expert, needs)
            return dx.zero_(), dweight.zero_()
        dy = contiguous_columns(dy)  # copies an expanded gradient once for both products
        dx = by_matrices(dy, weight, rows_per_expert) if needs[0] else x.new_empty(0)
        return dx, by_rows(dy, x, rows_per_expert) if needs[1] else x.new_empty(0)

    return OPERATOR.register(name, forward, backward, opaque=True)


def _parts(rows_per_expert: Tensor) -> Iterator[slice]:
    """Yields the rows of each expert; causes a host sync."""
    start = 0
    for size in rows_per_expert.tolist():
        yield slice(start, start + size)
        start += size


def _by_matrices_in_a_loop(x: Tensor, matrices: Tensor, rows_per_expert: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], matrices.shape[2])
    for part, matrix in zip(_parts(rows_per_expert), matrices.unbind(), strict=True):
        torch.mm(x[part], matrix, out=y[part])
    y[part.stop :].zero_()
    return y


def _by_rows_in_a_loop(dy: Tensor, x: Tensor, rows_per_expert: Tensor) -> Tensor:
    dweight = x.new_empty(len(rows_per_expert), dy.shape[1], x.shape[1])
    for part, one in zip(_parts(rows_per_expert), dweight.unbind(), strict=True):
        torch.mm(dy[part].t(), x[part], out=one)
    return dweight


def _by_matrices_in_aten(x: Tensor, matrices: Tensor, rows_per_expert: Tensor) -> Tensor:
    ends = _ends(x, rows_per_expert)
    y = grouped_mm(_aligned(x), _aligned(matrices), ends)
    # torch leaves rows after those of all experts uninitialized
    if y.device.type == "cpu":
        y[int(ends[-1]) :].zero_()
    elif has_triton():  # without a host sync, and without reading y
        from megalith.fusions.experts.kernels.clear_rows import clear_after_

        clear_after_(y, ends)
    else:
        y.masked_fill_((torch.arange(len(y), device=y.device) >= ends[-1]).unsqueeze(1), 0.0)
    return y


def _by_rows_in_aten(dy: Tensor, x: Tensor, rows_per_expert: Tensor) -> Tensor:
    return grouped_mm(_aligned(dy).t(), _aligned(x), _ends(x, rows_per_expert))


def _ends(x: Tensor, rows_per_expert: Tensor) -> Tensor:
    """The end of each expert's rows, at most R: on a GPU torch would read past the last row."""
    return rows_per_expert.cumsum(0, dtype=torch.int32).clamp_(max=x.shape[0])


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy if torch's operator does not accept its strides or address."""
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        return _aligned(x.transpose(-1, -2)).transpose(-1, -2)
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    aligned = not any(step % _ALIGNMENT for step in steps)
    taken = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] and aligned
    return x if taken else x.clone(memory_format=torch.contiguous_format)


blocked = _register("grouped_matmul_blocked", _by_matrices_in_a_loop, _by_rows_in_a_loop)
aten = _register("grouped_matmul_aten", _by_matrices_in_aten, _by_rows_in_aten)
