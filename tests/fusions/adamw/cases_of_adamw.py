"""Cases of AdamW: every row of the inputs is one tensor, and the updated tensors are the result."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.adamw.adamw import FUSION
from megalith.fusions.fused_adamw import fused_adamw_
from tests.fusions.harness import Case, Inputs

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def inputs(with_copy: bool, scaled: bool, T: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    acc = torch.promote_types(dtype, torch.float32)
    weight, exp_avg, exp_avg_sq = (torch.randn(T, H, device=device).to(acc) for _ in range(3))
    made = {"weight": weight, "exp_avg": exp_avg / 10, "exp_avg_sq": exp_avg_sq.square() / 10}
    made["grad"] = torch.randn(T, H, device=device).to(dtype)
    if with_copy:
        made["copy"] = torch.zeros(T, H, device=device).to(dtype)
    if scaled:
        made["grad_scale"] = torch.tensor(0.25, device=device)
    return made


def compute(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None = None,
    grad_scale: Tensor | None = None,
    *,
    backend: Any,
) -> tuple[Tensor, ...]:
    """Returns the tensors after an update, without changing the inputs."""
    given = (weight, exp_avg, exp_avg_sq) if copy is None else (weight, exp_avg, exp_avg_sq, copy)
    written = [x.clone(memory_format=torch.contiguous_format) for x in given]
    grads, w, m, v, *copies = ([*x.unbind(), x.new_empty(0)] for x in (grad, *written))  # the last one is empty
    params, masters = (copies[0], w) if copies else (w, None)
    fused_adamw_(params, masters, grads, m, v, **SETTINGS, grad_scale=grad_scale, backend=backend)
    return tuple(written)


def formula(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    (b1, b2), t = SETTINGS["betas"], SETTINGS["step"]
    g = grad if grad_scale is None else grad * grad_scale
    m, v = b1 * exp_avg + (1 - b1) * g, b2 * exp_avg_sq + (1 - b2) * g**2
    step = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + SETTINGS["eps"])
    w = weight - SETTINGS["lr"] * (step + SETTINGS["weight_decay"] * weight)
    return (w, m, v) if copy is None else (w, m, v, w)


def case(name: str, with_copy: bool, scaled: bool) -> Case:
    return Case(
        name,
        FUSION,
        partial(inputs, with_copy, scaled),
        compute,
        formula,
        cancels=("0", "1", "3"),  # terms of either sign
        cost=lambda weight, grad, copy=None, **_: cost.adamw(weight, grad, copy, len(weight) + 1),
        constant=("weight", "exp_avg", "exp_avg_sq", "grad", "copy", "grad_scale"),
        widths=(1, 7, 64, 127, 1000, 1536, 4096, 16385),
    )


CASES = [
    case("adamw, masters", with_copy=True, scaled=True),
    case("adamw", with_copy=False, scaled=False),
]
