"""Cases of the conversions between top-k indices and maps over experts; the width is the number of experts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.fused_indices_converter import fused_indices_to_multihot, fused_multihot_to_indices
from megalith.fusions.routing.indices_converter import INDICES_TO_MULTIHOT_FUSION, MULTIHOT_TO_INDICES_FUSION
from tests.fusions.harness import Case, Inputs

K, E = 3, 40


def chosen(kind: str, T: int, K: int, dtype: torch.dtype, device: str) -> Inputs:
    """Indices of ``kind``: "distinct", "not local" (some of them), or "repeated"."""
    index = torch.rand(T, E).argsort(dim=1)[:, :K] if kind != "repeated" else torch.randint(0, 2, (T, K))
    if kind == "not local":
        index = index.where(torch.rand(T, K) < 0.6, torch.tensor([-1, E, -7, 2**31 - 1])[torch.randint(0, 4, (T, K))])
    index = index.to(torch.int32 if kind == "not local" else torch.int64)
    return {
        "indices": index.clone(memory_format=torch.contiguous_format).to(device),
        "probs_indices": torch.rand(T, K, device=device).to(dtype),
    }


def multihot_formula(indices: Tensor, probs_indices: Tensor) -> tuple[Tensor, Tensor]:
    hit = indices[:, :, None] == torch.arange(E, device=indices.device)  # [T, K, E]
    return hit.any(dim=1), (hit * probs_indices[:, :, None]).sum(dim=1)


def mapped(T: int, E: int, dtype: torch.dtype, device: str) -> Inputs:
    share = torch.rand(T, 1) * 2 / max(E, 2) * K  # from none to twice as many as there are slots
    return {"multihot": (torch.rand(T, E) < share).to(device), "probs": torch.rand(T, E, device=device).to(dtype)}


def indices_formula(multihot: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    indices = torch.full((len(probs), K), -1, device=probs.device)
    rows = []
    for row, hot in enumerate(multihot):
        experts = hot.nonzero().flatten()[:K]
        indices[row, : len(experts)] = experts
        rows.append(torch.nn.functional.pad(probs[row, experts], (0, K - len(experts))))
    return indices, torch.stack(rows) if rows else probs[:, :K]


def to_multihot(name: str, kind: str, **more: Any) -> Case:
    return Case(
        f"indices to multihot, {name}",
        INDICES_TO_MULTIHOT_FUSION,
        partial(chosen, kind),
        partial(fused_indices_to_multihot, num_of_local_experts=E),
        multihot_formula,
        widths=(1, 7),
        **more,
    )


COST = partial(cost.indices_to_multihot, num_experts=E)
CASES = [
    to_multihot("distinct", "distinct", cost=COST),
    to_multihot("some of no expert here", "not local", cost=COST),
    to_multihot("experts named twice", "repeated", terms=lambda **_: {"1": 7}),
    Case(
        "multihot to indices",
        MULTIHOT_TO_INDICES_FUSION,
        mapped,
        partial(fused_multihot_to_indices, topk=K),
        indices_formula,
        widths=(7, 127, 1536),
        cost=partial(cost.multihot_to_indices, topk=K),
    ),
]
