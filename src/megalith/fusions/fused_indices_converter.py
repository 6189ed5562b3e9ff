"""What a router chose, from top-k indices to a dense map over experts and back.

    multihot[t, e] = indices[t, k] == e for some k
    probs[t, e]    = sum of probs_indices[t, k] over the k with indices[t, k] == e
    back: indices[t] lists the experts of multihot[t] in rising order, then -1

An index below 0, or of E and more, is of no expert here (of another rank, or dropped): it is skipped, and its gradient
is zero. Where a row names an expert twice the weights add up, and both slots get the whole gradient of the sum.

T tokens, E experts, K experts per token. Each conversion is the other's gradient, so backward keeps the indices alone
(8TK bytes, or 4TK for int32), where a map from columns to slots would take 4TE.
Floor: forward 8TK + eTK bytes read and (1 + e)TE written, with probabilities of e bytes; backward 8TK + 2eTK.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.formulas.checks import check_bool, check_floating, check_indices, check_one_device, check_shape
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.backend import Backend, Fusion, compiled
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import register

__all__ = [
    "INDICES_TO_MULTIHOT_FUSION",
    "MULTIHOT_TO_INDICES_FUSION",
    "IndicesToMultihot",
    "fused_indices_to_multihot",
    "fused_multihot_to_indices",
    "indices_outputs",
    "multihot_outputs",
]


def fused_indices_to_multihot(
    indices: Tensor, probs_indices: Tensor, num_of_local_experts: int, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Which experts each token goes to, and with what weight, as rows over all experts.

    Args:
        indices: [T, K], int32 or int64; what is not in [0, E) is skipped.
        probs_indices: [T, K], floating: the weight of each.
        num_of_local_experts: E.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        multihot [T, E], bool, and probs [T, E] in the dtype of ``probs_indices``, zero where multihot is False.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: fewer than one expert.
        BackendError: ``backend`` cannot run on these tensors.
    """
    check_indices(indices=indices)
    check_floating(probs_indices=probs_indices)
    check_one_device(indices=indices, probs_indices=probs_indices)
    if indices.dim() != 2:
        raise ShapeError(f"indices must be [T, K], a row for each token; got {list(indices.shape)}")
    check_shape("probs_indices", probs_indices, indices.shape, "one for each of indices")
    if num_of_local_experts < 1:
        raise ConfigError(f"num_of_local_experts must be 1 or more; got {num_of_local_experts}")
    compute = INDICES_TO_MULTIHOT_FUSION.path(probs_indices, backend)
    probs, multihot = compute(indices, probs_indices, num_of_local_experts)
    return multihot, probs


class IndicesToMultihot:
    """``apply`` is ``fused_indices_to_multihot``, under the name that the field knows."""

    apply = staticmethod(fused_indices_to_multihot)


def fused_multihot_to_indices(
    multihot: Tensor, probs: Tensor, topk: int, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token in rising order, and their weights: what ``fused_indices_to_multihot`` undoes.

    Args:
        multihot: [T, E], bool.
        probs: [T, E], floating; read where ``multihot`` is True.
        topk: K, the slots of a token. A token of fewer experts fills up with index -1 and weight 0; of more experts,
            those of the highest numbers are left out.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        indices [T, K], int64, and probs_indices [T, K] in the dtype of ``probs``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: ``topk`` is not in [1, E].
        BackendError: ``backend`` cannot run on these tensors.
    """
    check_bool(multihot=multihot)
    check_floating(probs=probs)
    check_one_device(multihot=multihot, probs=probs)
    if multihot.dim() != 2:
        raise ShapeError(f"multihot must be [T, E], a row for each token; got {list(multihot.shape)}")
    check_shape("probs", probs, multihot.shape, "one for each entry of multihot")
    if not 1 <= topk <= multihot.shape[1]:
        raise ConfigError(f"topk must be from 1 to the number of experts, {multihot.shape[1]}; got {topk}")
    probs_indices, indices = MULTIHOT_TO_INDICES_FUSION.path(probs, backend)(multihot, probs, topk)
    return indices, probs_indices


def _to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Reference: probs [T, E], then multihot [T, E]."""
    T, acc = indices.shape[0], wide(probs_indices.dtype)
    local, column = _columns(indices, num_experts)
    weights = probs_indices.to(acc).where(local, 0.0)
    probs = weights.new_zeros(T, num_experts).scatter_add_(1, column, weights)
    # how often an expert is named; no row has 2^16 slots
    count = torch.zeros_like(probs, dtype=torch.int16).scatter_add_(1, column, local.to(torch.int16))
    return probs.to(probs_indices.dtype), count != 0


def _to_indices(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Reference: probs_indices [T, K], then indices [T, K]."""
    E = multihot.shape[1]
    falling = torch.arange(E, 0, -1, device=multihot.device)  # all differ, so topk finds the same in every run
    found, column = falling.where(multihot, 0).topk(topk)
    return probs.gather(1, column).where(found > 0, 0.0), column.where(found > 0, -1)


def _at_indices(dense: Tensor, indices: Tensor) -> Tensor:
    """``dense`` [T, E] at ``indices`` [T, K], 0 where no expert is: dprobs_indices of dprobs."""
    local, column = _columns(indices, dense.shape[1])
    return dense.gather(1, column).where(local, 0.0)


def _columns(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Which indices are of an expert, and their columns; any column for those that are not."""
    column = indices.clamp(0, num_experts - 1)
    return column == indices, column.to(torch.int64)


def _blocked_to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    outputs = multihot_outputs(indices, probs_indices, num_experts)
    by_blocks(lambda indices, weights: _to_multihot(indices, weights, num_experts), (indices, probs_indices), outputs)
    return outputs


def _blocked_to_multihot_back(dprobs: Tensor, indices: Tensor) -> tuple[Tensor]:
    dprobs_indices = dprobs.new_empty(indices.shape)
    by_blocks(lambda dprobs, indices: (_at_indices(dprobs, indices),), (dprobs, indices), (dprobs_indices,))
    return (dprobs_indices,)


def _blocked_to_indices(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    outputs = indices_outputs(multihot, probs, topk)
    by_blocks(lambda multihot, probs: _to_indices(multihot, probs, topk), (multihot, probs), outputs)
    return outputs


def _blocked_to_indices_back(dprobs_indices: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor]:
    dprobs = dprobs_indices.new_empty(indices.shape[0], num_experts)

    def formula(indices: Tensor, dprobs_indices: Tensor) -> tuple[Tensor]:
        return _to_multihot(indices, dprobs_indices, num_experts)[:1]

    by_blocks(formula, (indices, dprobs_indices), (dprobs,))
    return (dprobs,)


def multihot_outputs(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Memory for probs [T, E] and multihot [T, E]."""
    probs = probs_indices.new_empty(indices.shape[0], num_experts)
    return probs, torch.empty_like(probs, dtype=torch.bool)


def indices_outputs(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Memory for probs_indices [T, K] and indices [T, K]."""
    probs_indices = probs.new_empty(multihot.shape[0], topk)
    return probs_indices, torch.empty_like(probs_indices, dtype=torch.int64)


_blocked_multihot_op = register(
    "indices_to_multihot_blocked",
    _blocked_to_multihot,
    multihot_outputs,
    _blocked_to_multihot_back,
    lambda dprobs, indices: (dprobs.new_empty(indices.shape),),
    gradients_of=("probs_indices",),
    saves=lambda inputs, outputs: (inputs[0],),
    opaque=True,
)
_blocked_indices_op = register(
    "multihot_to_indices_blocked",
    _blocked_to_indices,
    indices_outputs,
    _blocked_to_indices_back,
    lambda dprobs_indices, indices, num_experts: (dprobs_indices.new_empty(indices.shape[0], num_experts),),
    gradients_of=("probs",),
    saves=lambda inputs, outputs: (outputs[1], inputs[0].shape[1]),
    opaque=True,
)


def _triton_to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    from megalith.fusions.kernels.indices_converter import to_multihot_op

    return to_multihot_op(indices, probs_indices, num_experts)


def _triton_to_indices(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    from megalith.fusions.kernels.indices_converter import to_indices_op

    return to_indices_op(multihot, probs, topk)


_Conversion = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
_TO_MULTIHOT: Mapping[Backend, _Conversion] = {
    "triton": _triton_to_multihot,
    "compile": compiled(_to_multihot),
    "blocked": _blocked_multihot_op,
    "reference": _to_multihot,
}
_TO_INDICES: Mapping[Backend, _Conversion] = {
    "triton": _triton_to_indices,
    "compile": compiled(_to_indices),
    "blocked": _blocked_indices_op,
    "reference": _to_indices,
}
INDICES_TO_MULTIHOT_FUSION = Fusion("indices_to_multihot", _TO_MULTIHOT)
MULTIHOT_TO_INDICES_FUSION = Fusion("multihot_to_indices", _TO_INDICES)
