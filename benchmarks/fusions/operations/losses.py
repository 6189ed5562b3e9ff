"""Cross entropy of logits, and fused with the projection that computes them."""

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fusions import cost
from benchmarks.fusions.operation import Call, Inputs, Operation
from megalith import fusions
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy

__all__ = ["OPERATIONS", "liger_linear"]

_V, _H = 32768, 1024


def _logits(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    T = max(1, num_bytes // (_V * dtype.itemsize))
    logits = torch.randn(T, _V, device=device).to(dtype)
    return {"logits": logits, "target": torch.randint(_V, (T,), device=device)}


def _hidden(num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
    """As many tokens as have logits of ``num_bytes``."""
    T = max(1, num_bytes // (_V * dtype.itemsize))
    x, weight = (torch.randn(n, _H, device=device).to(dtype) * _H**-0.25 for n in (T, _V))
    return {"x": x, "weight": weight, "target": torch.randint(_V, (T,), device=device)}


def _ours(logits: Tensor, target: Tensor, backend: str | None = None) -> Tensor:
    return fusions.fused_vocab_parallel_cross_entropy(logits, target, backend=backend)


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), target, reduction="none")


def _eager_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _eager(functional.linear(x, weight), target)


def _cost(logits: Tensor, target: Tensor) -> cost.Cost:
    return cost.vocab_parallel_cross_entropy(logits, target)


def _liger() -> Call:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def compute(logits: Tensor, target: Tensor) -> Tensor:
        # it overwrites the logits with their gradient
        return LigerCrossEntropyFunction.apply(logits.clone(), target, None, -100, 0.0, 0.0, "none")[0]

    return compute


def liger_linear() -> Call:
    """The mean loss. It takes no upstream gradient per token, so it is no peer of the operation below."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda x, weight, target: LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]


def _megatron() -> Call:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return lambda logits, target: fused_vocab_parallel_cross_entropy(logits[:, None], target[:, None], None)[:, 0]


OPERATIONS = [
    Operation(
        "cross entropy",
        "vocab_parallel_cross_entropy",
        _logits,
        _ours,
        _eager,
        _cost,
        {"Liger": _liger, "Megatron": _megatron},
    ),
    Operation(
        "linear + cross entropy",
        "linear_cross_entropy",
        _hidden,
        fused_linear_cross_entropy,
        _eager_linear,
    ),
]
