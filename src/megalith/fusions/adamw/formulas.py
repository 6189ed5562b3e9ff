"""Implements the formulas stated in ``adamw``.

w is a weight, g its gradient, m and v are its moments. Lists have one tensor per parameter; ``copies``, the rounded
weights, may be empty.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.blocks import blocks
from megalith.fusions.core.registration import register_without_gradient

__all__ = ["MUTATED", "Operands", "adamw", "aten", "outputs", "reference"]

MUTATED = ("weights", "copies", "exp_avgs", "exp_avg_sqs")


class Operands(NamedTuple):
    """Operands of the operator, lists with one tensor per parameter; for ``settings`` see ``adamw``."""

    weights: list[Tensor]
    copies: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    settings: list[float]
    grad_scale: Tensor | None
    found_nonfinite: Tensor | None


def outputs(*_: Unpack[Operands]) -> None:
    """Allocates nothing: an update only writes to the ``MUTATED`` operands."""


def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, settings: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """w, m and v after an update, with the operations of ``torch.optim.AdamW`` in the same order.

    ``settings`` are the learning rate, both betas, eps, the weight decay and the number of the update.
    """
    lr, beta1, beta2, eps, decay, step = settings
    m = m.lerp(g, 1 - beta1)
    v = (v * beta2).addcmul(g, g, value=1 - beta2)
    root = v.sqrt() / (1 - beta2**step) ** 0.5
    return (w * (1 - lr * decay)).addcdiv(m, root + eps, value=-lr / (1 - beta1**step)), m, v


def reference(
    weights: list[Tensor],
    copies: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    settings: list[float],
    grad_scale: Tensor | None,
    found_nonfinite: Tensor | None,
) -> None:
    """One update, tensor by tensor."""
    for i, (w, grad, m, v) in enumerate(zip(weights, grads, exp_avgs, exp_avg_sqs, strict=True)):
        g = grad.to(w.dtype) if grad_scale is None else grad.to(w.dtype) * grad_scale
        pairs = list(zip((w, m, v), adamw(w, g, m, v, settings), strict=True))
        _write_(pairs if not copies else [*pairs, (copies[i], pairs[0][1])], found_nonfinite)


def _aten(
    weights: list[Tensor],
    copies: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    settings: list[float],
    grad_scale: Tensor | None,
    found_nonfinite: Tensor | None,
) -> None:
    """torch's fused operator; gradients are widened before it and weights rounded after it, block by block."""
    lr, beta1, beta2, eps, decay, step = settings
    number = weights[0].new_full((), step, dtype=torch.float32)

    def update_(w: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
        torch._fused_adamw_(
            w, g, m, v, [], [number] * len(w), lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
            amsgrad=False, maximize=False, found_inf=found_nonfinite,
        )  # fmt: skip
        torch.autograd.graph.increment_version((*w, *m, *v))  # torch's operator does not bump the version counters

    if not copies and grad_scale is None and grads[0].dtype == weights[0].dtype:
        update_(weights, [grad.contiguous() for grad in grads], exp_avgs, exp_avg_sqs)
        return
    for i, tensors in enumerate(zip(weights, grads, exp_avgs, exp_avg_sqs, strict=True)):
        w, grad, m, v = (tensor.reshape(-1) for tensor in tensors)
        for block in blocks(len(w), 1):
            g = grad[block].to(w.dtype)
            update_([w[block]], [g if grad_scale is None else g * grad_scale], [m[block]], [v[block]])
            if copies:
                _write_([(copies[i].view(-1)[block], w[block])], found_nonfinite)


def _write_(pairs: Sequence[tuple[Tensor, Tensor]], found_nonfinite: Tensor | None) -> None:
    """Copies the second tensor of each pair to the first, unless ``found_nonfinite``."""
    for old, new in pairs:
        old.copy_(new if found_nonfinite is None else torch.where(found_nonfinite != 0, old, new.to(old.dtype)))


_traced = register_without_gradient("adamw_aten_", _aten, outputs, mutates=MUTATED, opaque=True)


def aten(*operands: Unpack[Operands]) -> None:
    """``_aten``, as an operator only inside torch.compile: passing five lists through one costs a tenth of a step."""
    (_traced if torch.compiler.is_compiling() else _aten)(*operands)
