"""Converts a router's choices from top-k indices to a dense map over experts, and back.

    multihot[t, e] = indices[t, k] == e for some k
    probs[t, e]    = sum of probs_indices[t, k] over the k with indices[t, k] == e
    back: indices[t] lists the experts of multihot[t] in ascending order, then -1

An index outside [0, E) does not refer to an expert here (it is on another rank, or dropped): it is skipped, and its
gradient is zero. If a row contains an expert twice, the weights are summed, and both slots get the gradient of the sum.

T tokens, E experts, K experts per token. Each conversion is the other's gradient, so only the indices are saved for
backward (8TK bytes, or 4TK for int32), while a map from columns to slots would take 4TE.
Lower bound: forward 8TK + eTK bytes read and (1 + e)TE written, with probabilities of e bytes; backward 8TK + 2eTK.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_bool, check_floating, check_indices, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.registry import registered
from megalith.fusions.routing.indices_converter_formulas import (
    to_indices_blocked,
    to_indices_reference,
    to_multihot_blocked,
    to_multihot_reference,
    to_multihot_reference_back,
)
from megalith.torch_compat.compiler import break_graph_before_gradients_are_lost

__all__ = [
    "INDICES_TO_MULTIHOT_FUSION",
    "MULTIHOT_TO_INDICES_FUSION",
    "IndicesToMultihot",
    "fused_indices_to_multihot",
    "fused_multihot_to_indices",
]


def fused_indices_to_multihot(
    indices: Tensor, probs_indices: Tensor, num_of_local_experts: int, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Returns which experts each token is routed to, and with what weight, as rows over all experts.

    Args:
        indices: [T, K], int32 or int64; values outside [0, E) are skipped.
        probs_indices: [T, K], floating point: the weight of each index.
        num_of_local_experts: E.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        multihot [T, E], bool, and probs [T, E] in the dtype of ``probs_indices``, zero where multihot is False.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: ``num_of_local_experts`` is not an integer, or less than one.
        BackendError: ``backend`` cannot run on these tensors.
    """
    check_indices(indices=indices)
    check_floating(probs_indices=probs_indices)
    check_one_device(indices=indices, probs_indices=probs_indices)
    if indices.dim() != 2:
        raise ShapeError(f"indices must be [T, K], a row for each token; got {list(indices.shape)}")
    check_shape("probs_indices", probs_indices, indices.shape, "one for each entry of indices")
    if not isinstance(num_of_local_experts, Integral) or num_of_local_experts < 1:
        raise ConfigError(f"num_of_local_experts must be an integer, 1 or more; got {num_of_local_experts!r}")
    compute = INDICES_TO_MULTIHOT_FUSION.path(probs_indices, backend)
    probs, multihot = compute(indices, probs_indices, num_of_local_experts)
    return multihot, probs


class IndicesToMultihot(torch.autograd.Function):
    """``apply(indices, probs_indices, num_of_local_experts)`` is ``fused_indices_to_multihot``."""

    @staticmethod
    def forward(
        ctx: Context, indices: Tensor, probs_indices: Tensor, num_of_local_experts: int
    ) -> tuple[Tensor, Tensor]:
        break_graph_before_gradients_are_lost()
        ctx.backend = INDICES_TO_MULTIHOT_FUSION.choose_for_function(probs_indices)
        ctx.save_for_backward(indices)
        return fused_indices_to_multihot(indices, probs_indices, num_of_local_experts, backend=ctx.backend)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, grad_multihot_indices: None, grad_probs_in_multihot: Tensor
    ) -> tuple[None, Tensor, None]:
        (indices,) = ctx.saved_tensors
        back = INDICES_TO_MULTIHOT_FUSION.backs[ctx.backend]
        return None, back(grad_probs_in_multihot, indices)[0], None


def fused_multihot_to_indices(
    multihot: Tensor, probs: Tensor, topk: int, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token in ascending order, and their weights; inverts ``fused_indices_to_multihot``.

    Args:
        multihot: [T, E], bool.
        probs: [T, E], floating point; read where ``multihot`` is True.
        topk: K, the slots per token. Unused slots get index -1 and weight 0; if a token has more than K experts, those
            with the highest indices are omitted.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

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


def _triton_to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    from megalith.fusions.routing.kernels.indices_converter import to_multihot_op

    return to_multihot_op(indices, probs_indices, num_experts)


def _triton_to_multihot_back(dprobs: Tensor, indices: Tensor) -> tuple[Tensor]:
    from megalith.fusions.routing.kernels.indices_converter import to_multihot_op

    return to_multihot_op.back(dprobs, indices)


def _triton_to_indices(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    from megalith.fusions.routing.kernels.indices_converter import to_indices_op

    return to_indices_op(multihot, probs, topk)


_Conversion = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
_TO_MULTIHOT: Mapping[Backend, _Conversion] = {
    "triton": _triton_to_multihot,
    "compile": compiled(to_multihot_reference),
    "blocked": to_multihot_blocked,
    "reference": to_multihot_reference,
}
_TO_INDICES: Mapping[Backend, _Conversion] = {
    "triton": _triton_to_indices,
    "compile": compiled(to_indices_reference),
    "blocked": to_indices_blocked,
    "reference": to_indices_reference,
}
_TO_MULTIHOT_BACKS: Mapping[Backend, Callable[..., tuple[Tensor]]] = {
    "triton": _triton_to_multihot_back,
    "compile": compiled(to_multihot_reference_back),
    "blocked": to_multihot_blocked.back,
    "reference": to_multihot_reference_back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("reference",)}
INDICES_TO_MULTIHOT_FUSION = registered(
    Fusion("indices_to_multihot", _TO_MULTIHOT, defaults=_DEFAULTS, backs=_TO_MULTIHOT_BACKS)
)
MULTIHOT_TO_INDICES_FUSION = registered(Fusion("multihot_to_indices", _TO_INDICES, defaults=_DEFAULTS))
