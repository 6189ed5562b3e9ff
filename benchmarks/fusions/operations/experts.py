"""Grouped matmuls of experts; 16 MiB stands for 2,048 tokens."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.fusions.operation import Inputs, Operation
from megalith import fusions

__all__ = ["OPERATIONS"]

_H, _F = 512, 1024
_TOKEN_BYTES = 8192  # one token for each 8192 bytes, whatever the dtype


def _inputs(
    num_bytes: int, dtype: torch.dtype, device: str, *, num_experts: int, topk: int, skewed: bool = False
) -> Inputs:
    """The same number of rows for each expert, or 1/e of the first expert's for expert e (Zipf)."""
    R = max(1, num_bytes // _TOKEN_BYTES) * topk
    shares = 1 / torch.arange(1, num_experts + 1) if skewed else torch.ones(num_experts)
    ends = (shares.cumsum(0) / shares.sum() * R).round().int()
    return {
        "x": torch.randn(R, _H, device=device).to(dtype),
        "weight": torch.randn(num_experts, _F, _H, device=device).to(dtype) * _H**-0.5,
        "rows_per_expert": ends.diff(prepend=ends.new_zeros(1)).to(device),
    }


def _eager(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    parts = x.split(rows_per_expert.tolist())
    return torch.cat([part @ one.t() for part, one in zip(parts, weight.unbind(), strict=True)])


def _operation(name: str, num_experts: int, topk: int, skewed: bool = False) -> Operation:
    inputs = partial(_inputs, num_experts=num_experts, topk=topk, skewed=skewed)
    loop = {"Megalith, blocked": lambda: partial(fusions.grouped_matmul, backend="blocked")}
    return Operation(f"grouped matmul, {name}", "grouped_matmul", inputs, fusions.grouped_matmul, _eager, peers=loop)


OPERATIONS = [
    _operation("8 experts, top 2", 8, 2),
    _operation("8 experts, top 8", 8, 8),
    _operation("64 experts, top 2", 64, 2),
    _operation("64 experts, top 8", 64, 8),
    _operation("64 experts, top 2, skewed", 64, 2, skewed=True),
]
