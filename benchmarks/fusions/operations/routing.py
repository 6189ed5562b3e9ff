"""Routing and permutation for a mixture of experts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions
from megalith.fusions.fused_pad_routing_map import fused_pad_routing_map

__all__ = ["OPERATIONS"]

_E, _K, _H = 64, 8, 2048


def _indices(T: int, device: str) -> Tensor:
    return torch.rand(T, _E, device=device).topk(_K, dim=-1).indices


def _map(T: int, device: str) -> Tensor:
    return torch.zeros(T, _E, dtype=torch.bool, device=device).scatter(1, _indices(T, device), True)


def _converted(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    T = max(1, num_bytes // (_E * 4))
    return {"indices": _indices(T, device), "probs": torch.rand(T, _K, device=device)}


def _eager_multihot(indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    dense = probs.new_zeros(len(indices), _E)
    return torch.zeros_like(dense, dtype=torch.bool).scatter(1, indices, True), dense.scatter(1, indices, probs)


def _ours_multihot(indices: Tensor, probs: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    return fusions.fused_indices_to_multihot(indices, probs, _E, backend=backend)


def _megatron_multihot() -> Call:
    from megatron.core.fusions.fused_indices_converter import fused_indices_to_multihot

    return lambda indices, probs: fused_indices_to_multihot(indices, probs, _E)


def _routing_map(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    return {"routing_map": _map(max(1, num_bytes // _E), device)}


def _eager_pad(routing_map: Tensor, *, multiple: int) -> Tensor:
    missing = -routing_map.sum(dim=0) % multiple
    return routing_map | ((~routing_map).cumsum(dim=0) <= missing)


def _megatron_pad(multiple: int) -> Call:
    from megatron.core.fusions.fused_pad_routing_map import fused_pad_routing_map

    return lambda routing_map: fused_pad_routing_map(routing_map, multiple)


def _tokens(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    """As many tokens as have permuted rows of ``num_bytes``."""
    T = max(1, num_bytes // (_K * _H * dtype.itemsize))
    return {"tokens": torch.randn(T, _H, device=device).to(dtype), "indices": _indices(T, device)}


def _ours_there_and_back(tokens: Tensor, indices: Tensor, backend: str | None = None) -> Tensor:
    permuted, _, row_map = fusions.permute(
        tokens, indices, num_out_tokens=indices.numel(), num_experts=_E, backend=backend
    )
    return fusions.unpermute(permuted, row_map, tokens.shape, backend=backend)


def _eager_there_and_back(tokens: Tensor, indices: Tensor) -> Tensor:
    order = indices.flatten().argsort(stable=True) // _K  # the token of each row
    return torch.zeros_like(tokens).index_add(0, order, tokens.index_select(0, order))


def _logits(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    """Rows of distinct numbers, in every dtype: contenders may break ties differently."""
    order = torch.rand(max(1, num_bytes // (_E * dtype.itemsize)), _E, device=device).argsort(dim=-1)
    return {"logits": (order / (_E / 8) - 4.0).to(dtype)}


def _ours_router(logits: Tensor, backend: str | None = None) -> tuple[Any, ...]:
    return tuple(fusions.fused_topk_router(logits, _K, backend=backend))


def _eager_router(logits: Tensor) -> tuple[Tensor, ...]:
    scores, indices = logits.float().topk(_K, dim=-1)
    return torch.softmax(scores, dim=-1), indices, indices.flatten().bincount(minlength=_E)


def _our_scores(logits: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    return fusions.compute_routing_scores_for_aux_loss(logits, _K, backend=backend)


def _eager_scores(logits: Tensor) -> tuple[Tensor, ...]:
    scores = torch.softmax(logits.float(), dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(_K, dim=-1).indices, True), scores


def _our_row_map(indices: Tensor, probs: Tensor, backend: str | None = None) -> fusions.RowMap:
    return fusions.row_map(indices, indices.numel(), num_experts=_E, backend=backend)


def _eager_row_map(indices: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    order = indices.flatten().argsort(stable=True)
    return order, order.argsort(), indices.flatten().bincount(minlength=_E)


def _rows(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    T = max(1, num_bytes // (_K * _H * dtype.itemsize))
    indices = _indices(T, device)
    made: Inputs = {"rows": torch.randn(T * _K, _H, device=device).to(dtype), "probs": torch.rand(T, _K, device=device)}
    made["row_map"] = fusions.row_map(indices, T * _K, num_experts=_E)
    return made | {"order": indices.flatten().argsort(stable=True)}


def _our_unpermute(
    rows: Tensor, probs: Tensor, row_map: fusions.RowMap, order: Tensor, backend: str | None = None
) -> Tensor:
    return fusions.unpermute(rows, row_map, probs=probs, backend=backend)


def _eager_unpermute(rows: Tensor, probs: Tensor, row_map: fusions.RowMap, order: Tensor) -> Tensor:
    weighted = (rows * probs.flatten()[order, None]).to(rows.dtype)
    return rows.new_zeros(len(probs), _H).index_add(0, order // _K, weighted)


def _dense(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    T = max(1, num_bytes // (_E * 4))
    return {"multihot": _map(T, device), "probs": torch.rand(T, _E, device=device)}


def _our_indices(multihot: Tensor, probs: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    return fusions.fused_multihot_to_indices(multihot, probs, _K, backend=backend)


def _eager_indices(multihot: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    indices = multihot.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :_K]
    return indices, probs.gather(1, indices)


OPERATIONS = [
    Operation(
        "indices to multihot",
        "indices_to_multihot",
        _converted,
        _ours_multihot,
        _eager_multihot,
        peers={"Megatron": _megatron_multihot},
        typed=False,
    ),
    Operation(
        "pad routing map",
        "pad_routing_map",
        _routing_map,
        partial(fused_pad_routing_map, pad_multiple=16),
        partial(_eager_pad, multiple=16),
        peers={"Megatron": partial(_megatron_pad, 16)},
        typed=False,
    ),
    Operation("permute and unpermute", "permute", _tokens, _ours_there_and_back, _eager_there_and_back),
    Operation("row map", "row_map", _converted, _our_row_map, _eager_row_map, typed=False),
    Operation("unpermute with weights", "unpermute", _rows, _our_unpermute, _eager_unpermute, constant=("order",)),
    Operation("multihot to indices", "multihot_to_indices", _dense, _our_indices, _eager_indices, typed=False),
    Operation("top-k router", "topk_router", _logits, _ours_router, _eager_router),
    Operation("scores for the auxiliary loss", "aux_loss_scores", _logits, _our_scores, _eager_scores),
]
