"""Cases of padding a routing map; the width is the number of experts."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.experts.pad_routing_map import FUSION
from megalith.fusions.fused_pad_routing_map import fused_pad_routing_map
from tests.fusions.harness import Case, Inputs


def inputs(kind: torch.dtype, share: float, T: int, E: int, dtype: torch.dtype, device: str) -> Inputs:
    return {"routing_map": (torch.rand(30 * T, E, device=device) < share).to(kind)}


def formula(routing_map: Tensor, pad_multiple: int) -> Tensor:
    padded = routing_map.clone()
    for column in padded.unbind(dim=1):
        missing = -int(column.sum()) % pad_multiple
        column[(column == 0).nonzero().flatten()[:missing]] = 1
    return padded


def case(name: str, pad_multiple: int, kind: torch.dtype, share: float = 0.2) -> Case:
    return Case(
        f"pad routing map, {name}",
        FUSION,
        partial(inputs, kind, share),
        partial(fused_pad_routing_map, pad_multiple=pad_multiple),
        partial(formula, pad_multiple=pad_multiple),
        cost=cost.pad_routing_map,
        widths=(1, 7, 127),
        dtypes=(torch.float32,),
    )


CASES = [
    case("bool", 16, torch.bool),
    case("int32", 32, torch.int32),
    case("int64, too few zeros", 64, torch.int64, share=0.97),
]
