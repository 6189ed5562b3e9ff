"""Cases of permuting tokens to experts and back; the width is the hidden size."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.core.dispatch import Backend
from megalith.fusions.experts.permute import PERMUTE_FUSION, UNPERMUTE_FUSION
from megalith.fusions.experts.row_map import FUSION, RowMap, row_map
from megalith.fusions.fused_permute import permute, unpermute
from tests.fusions.harness import Case, Inputs

E, K, PAD = 6, 3, 4
MAP: dict[str, Any] = {}
INDICES: dict[str, Any] = {"num_experts": E}


def num_rows(T: int) -> int:
    return (K * T + E * PAD) // PAD * PAD  # more than are routed, so that there are gaps at the end too


def routing(kind: str, T: int, device: str) -> Tensor:
    """A map or indices, with K experts per token; "dropped" and "repeated" are indices."""
    index = torch.rand(T, E).argsort(dim=1)[:, :K].clone(memory_format=torch.contiguous_format)
    if kind == "dropped":
        index = index.where(torch.rand(T, K) < 0.7, torch.tensor([-1, E, 99])[torch.randint(0, 3, (T, K))]).int()
    if kind == "repeated":
        index = index // 3
    if kind == "map":
        index = torch.zeros(T, E, dtype=torch.bool).scatter_(1, index, True)
    return index.to(device)


def permute_inputs(kind: str, probs: bool, T: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    where = routing(kind, T, device)
    weights = torch.rand(where.shape, device=device).to(torch.promote_types(dtype, torch.float32)) if probs else None
    return {"tokens": torch.randn(T, H, device=device).to(dtype), "routing_map": where, "probs": weights}


def unpermute_inputs(kind: str, probs: bool, T: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    made = permute_inputs(kind, probs, T, H, dtype, device)
    del made["tokens"]
    return {"permuted": torch.randn(num_rows(T), H, device=device).to(dtype)} | made


def map_formula(routing_map: Tensor, pad: int = 1, limit: int | None = None) -> RowMap:
    """Row by row: every expert takes its tokens in order, then skips to a multiple of ``pad``."""
    R = num_rows(len(routing_map)) if limit is None else limit
    row_of, token_of, sizes, row = torch.full(routing_map.shape, -1), torch.full((R,), -1), [], 0
    for expert in range(E):
        first = row
        for token, slots in enumerate(routing_map.tolist()):
            chosen = [expert] if routing_map.dtype == torch.bool else range(K)
            for slot in (slot for slot in chosen if (slots[slot] is True or slots[slot] == expert)):
                if routing_map.dtype != torch.bool or slots[slot]:
                    if row < R:
                        row_of[token, slot], token_of[row] = row, token
                    row += 1
        row += -row % pad if first % pad == 0 else 0
        sizes.append(min(row, R) - min(first, R))
    device = routing_map.device
    return RowMap(row_of.to(device), token_of.to(device), torch.tensor(sizes, device=device))


def permute_formula(tokens: Tensor, routing_map: Tensor, probs: Tensor | None, pad: int = 1) -> tuple[Tensor, ...]:
    rows = map_formula(routing_map, pad)
    zero = 0 * tokens.sum(dim=0)  # part of the graph even without tokens
    permuted = torch.stack([zero if token < 0 else tokens[token] for token in rows.token_of.tolist()])
    weights = []
    if probs is not None:
        slots = {int(row): (t, s) for t, line in enumerate(rows.row_of) for s, row in enumerate(line)}
        weights = [torch.stack([probs[slots[r]] if r in slots else 0 * probs.sum() for r in range(len(permuted))])]
    return permuted, *weights, *rows


def unpermute_formula(permuted: Tensor, routing_map: Tensor, probs: Tensor | None, pad: int = 1) -> Tensor:
    y = []
    for token, rows in enumerate(map_formula(routing_map, pad).row_of.tolist()):
        terms = [permuted[r] * (1 if probs is None else probs[token, s]) for s, r in enumerate(rows) if r >= 0]
        y.append(sum(terms, torch.zeros_like(permuted[0])))
    return torch.stack(y) if y else permuted[:0] * (1 if probs is None else probs.sum())


def run_permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, backend: Backend | None, **settings: Any
) -> tuple[Tensor, ...]:
    permuted, weights, rows = permute(tokens, routing_map, probs, num_rows(len(tokens)), backend=backend, **settings)
    return (permuted, *rows) if weights is None else (permuted, weights, *rows)


def run_moves(tokens: Tensor, routing_map: Tensor, probs: Tensor | None, backend: Backend) -> tuple[Tensor, ...]:
    """The map is not part of the measured operation, so that the bytes are those of the moves."""
    rows = row_map(routing_map, num_rows(len(tokens)), num_experts=E, backend="reference")
    permuted, weights = PERMUTE_FUSION.path(tokens, backend)(tokens, probs, rows.row_of, rows.token_of)
    return permuted, weights, *rows


def run_unpermute(
    permuted: Tensor, routing_map: Tensor, probs: Tensor | None, backend: Backend | None, **settings: Any
) -> Tensor:
    rows = row_map(routing_map, num_rows(len(routing_map)), backend="reference", **settings)
    return unpermute(permuted, rows, None, probs, backend=backend)


def case(
    name: str, run: Callable[..., Any], kind: str, *, probs: bool = True, pad: int = 1, counted: Any = None
) -> Case:
    """A case of permute or unpermute, as given by ``run``."""
    settings = (MAP if kind == "map" else INDICES) | ({} if pad == 1 else {"pad_multiple": pad})
    back = run is run_unpermute
    return Case(
        name,
        UNPERMUTE_FUSION if back else PERMUTE_FUSION,
        partial(unpermute_inputs if back else permute_inputs, kind, probs),
        run if run is run_moves else partial(run, **settings),
        partial(unpermute_formula if back else permute_formula, pad=pad),
        terms=lambda **given: {
            "0": K if back else 1, "dtokens": K, "dprobs": next(iter(given.values())).shape[1] if back else 1
        },
        cost=counted,
        widths=(1, 127, 1536),
    )  # fmt: skip


def map_case(name: str, kind: str, pad: int = 1, limit: int | None = None) -> Case:
    def compute(routing_map: Tensor, backend: Backend | None) -> RowMap:
        rows = num_rows(len(routing_map)) if limit is None else limit
        settings = MAP if kind == "map" else INDICES
        return row_map(routing_map, rows, pad_multiple=pad, backend=backend, **settings)

    return Case(
        f"row map, {name}",
        FUSION,
        lambda T, width, dtype, device: {"routing_map": routing(kind, 40 * T, device)},
        compute,
        partial(map_formula, pad=pad, limit=limit),
        cost=partial(cost.row_map, num_rows=num_rows(160), num_experts=E) if limit is None else None,
        widths=(1,),
        dtypes=(torch.float32,),
    )


CASES = [
    map_case("indices", "indices"),
    map_case("map, padded", "map", pad=PAD),
    map_case("indices, some of no expert here, padded", "dropped", pad=PAD),
    map_case("experts named twice", "repeated"),
    map_case("map, more than there is room for", "map", limit=100),
    case("permute, rows alone", run_moves, "dropped", counted=partial(cost.permute, num_experts=E, num_rows=num_rows)),
    case("permute, indices", run_permute, "indices"),
    case("permute, map, padded", run_permute, "map", pad=PAD),
    case("permute, map, no weights", run_permute, "map", probs=False),
    case("unpermute, indices", run_unpermute, "indices", counted=partial(cost.unpermute, num_experts=E)),
    case("unpermute, some of no expert here", run_unpermute, "dropped", pad=PAD),
    case("unpermute, map, no weights", run_unpermute, "map", probs=False, pad=PAD),
]
