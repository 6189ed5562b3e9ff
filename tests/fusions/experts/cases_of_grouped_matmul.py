"""Cases of grouped matmuls; the width is H, in multiples that every path accepts."""

import torch
from torch import Tensor

from megalith.fusions.experts.grouped_matmul import FUSION, grouped_matmul
from tests.fusions.harness import Case, Inputs

E, F = 3, 16


def inputs(R: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    """An expert without rows between two with rows, and a gap at the end."""
    routed = max(0, R - 1)
    sizes = torch.tensor([routed // 2, 0, routed - routed // 2], dtype=torch.int32, device=device)
    return {
        "x": torch.randn(R, H, device=device).to(dtype),
        "weight": torch.randn(E, F, H, device=device).to(dtype),
        "rows_per_expert": sizes,
    }


def formula(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    sizes = rows_per_expert.tolist()
    *parts, gap = x.split([*sizes, len(x) - sum(sizes)])
    return torch.cat([*(part @ one.t() for part, one in zip(parts, weight, strict=True)), 0 * gap @ weight[0].t()])


CASES = [
    Case(
        "grouped matmul",
        FUSION,
        inputs,
        grouped_matmul,
        formula,
        terms=lambda x, weight, rows_per_expert: {"0": x.shape[1], "dx": F, "dweight": max(1, x.shape[0])},
        widths=(1024, 72, 8),
    )
]
