"""Implements the formulas stated in ``indices_converter``; T tokens, E experts, K slots."""

import torch
from torch import Tensor

from megalith.fusions.core.blocks import by_blocks
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import wide

__all__ = [
    "TO_INDICES_OPERATOR",
    "TO_MULTIHOT_OPERATOR",
    "to_indices_blocked",
    "to_indices_reference",
    "to_multihot_blocked",
    "to_multihot_reference",
    "to_multihot_reference_back",
]


def to_multihot_reference(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns probs [T, E] and multihot [T, E]."""
    T, acc = indices.shape[0], wide(probs_indices.dtype)
    local, column = _columns(indices, num_experts)
    weights = probs_indices.to(acc).where(local, 0.0)
    probs = weights.new_zeros(T, num_experts).scatter_add_(1, column, weights)
    # occurrences of each expert; a row has fewer than 2^16 slots
    count = torch.zeros_like(probs, dtype=torch.int16).scatter_add_(1, column, local.to(torch.int16))
    return probs.to(probs_indices.dtype), count.to(torch.bool)  # takes a quarter of the time of count != 0


def to_indices_reference(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Returns probs_indices [T, K] and indices [T, K]."""
    E = multihot.shape[1]
    falling = torch.arange(E, 0, -1, device=multihot.device)  # all different, so topk is deterministic
    found, column = falling.where(multihot, 0).topk(topk)
    return probs.gather(1, column).where(found > 0, 0.0), column.where(found > 0, -1)


def to_multihot_reference_back(dprobs: Tensor, indices: Tensor) -> tuple[Tensor]:
    """dprobs_indices: ``dprobs`` [T, E] at ``indices`` [T, K], 0 for indices that are skipped."""
    local, column = _columns(indices, dprobs.shape[1])
    return (dprobs.gather(1, column).where(local, 0.0),)


def _columns(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Which indices refer to an expert, and their columns; an arbitrary column for the others."""
    column = indices.clamp(0, num_experts - 1)
    return column == indices, column.to(torch.int64)


def _to_multihot_outputs(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Allocates probs [T, E] and multihot [T, E]."""
    probs = probs_indices.new_empty(indices.shape[0], num_experts)
    return probs, torch.empty_like(probs, dtype=torch.bool)


def _to_multihot_gradients(dprobs: Tensor, indices: Tensor) -> tuple[Tensor]:
    """Allocates dprobs_indices [T, K]."""
    return (dprobs.new_empty(indices.shape),)


def _to_multihot_saves(_: tuple[Tensor, ...], indices: Tensor, *__: object) -> tuple[object, ...]:
    return (indices,)


TO_MULTIHOT_OPERATOR = Operator(
    _to_multihot_outputs, _to_multihot_gradients, of=("probs_indices",), saves=_to_multihot_saves
)


def _to_indices_outputs(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Allocates probs_indices [T, K] and indices [T, K]."""
    probs_indices = probs.new_empty(multihot.shape[0], topk)
    return probs_indices, torch.empty_like(probs_indices, dtype=torch.int64)


def _to_indices_gradients(dprobs_indices: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor]:
    """Allocates dprobs [T, E]."""
    return (dprobs_indices.new_empty(indices.shape[0], num_experts),)


def _to_indices_saves(outputs: tuple[Tensor, ...], multihot: Tensor, *_: object) -> tuple[object, ...]:
    indices = outputs[1]
    return indices, multihot.shape[1]


TO_INDICES_OPERATOR = Operator(_to_indices_outputs, _to_indices_gradients, of=("probs",), saves=_to_indices_saves)


def _to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    outputs = _to_multihot_outputs(indices, probs_indices, num_experts)
    by_blocks(
        lambda indices, weights: to_multihot_reference(indices, weights, num_experts), (indices, probs_indices), outputs
    )
    return outputs


def _to_multihot_back(dprobs: Tensor, indices: Tensor) -> tuple[Tensor]:
    (dprobs_indices,) = _to_multihot_gradients(dprobs, indices)
    by_blocks(to_multihot_reference_back, (dprobs, indices), (dprobs_indices,))
    return (dprobs_indices,)


def _to_indices(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    outputs = _to_indices_outputs(multihot, probs, topk)
    by_blocks(lambda multihot, probs: to_indices_reference(multihot, probs, topk), (multihot, probs), outputs)
    return outputs


def _to_indices_back(dprobs_indices: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor]:
    (dprobs,) = _to_indices_gradients(dprobs_indices, indices, num_experts)

    def formula(indices: Tensor, dprobs_indices: Tensor) -> tuple[Tensor]:
        return to_multihot_reference(indices, dprobs_indices, num_experts)[:1]

    by_blocks(formula, (indices, dprobs_indices), (dprobs,))
    return (dprobs,)


to_multihot_blocked = TO_MULTIHOT_OPERATOR.register(
    "indices_to_multihot_blocked", _to_multihot, _to_multihot_back, opaque=True
)
to_indices_blocked = TO_INDICES_OPERATOR.register(
    "multihot_to_indices_blocked", _to_indices, _to_indices_back, opaque=True
)
