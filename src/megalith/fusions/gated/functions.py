"""Shared forward and backward of the ``torch.autograd.Function`` classes of gated units, which differ in arguments."""

from typing import Any

import torch
from torch import Tensor

from megalith.errors import BackendError
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.rows import as_rows, not_a_view
from megalith.fusions.gated.formulas import Gating
from megalith.fusions.gated.glu import FUSION as GLU
from megalith.fusions.gated.glu import check
from megalith.fusions.gated.glu_float8 import FUSION as GLU_FLOAT8

__all__ = ["REFUSED_OFFLOAD", "backward", "forward"]

REFUSED_OFFLOAD = (
    "cpu_offload_input moves saved tensors to the CPU, which torch.compile cannot trace; leave it off under "
    "torch.compile, or keep the call out of the graph with torch.compiler.disable"
)


def forward(
    ctx: Context,
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    gating: Gating,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
) -> Tensor:
    """y [..., F] from a packed ``x`` [..., 2F], ``bias`` [2F] and ``weights`` [..., 1]."""
    check(x, None, bias, weights, gating.interleaved)
    if cpu_offload_input and torch.compiler.is_compiling():
        raise BackendError(REFUSED_OFFLOAD)
    rows, w = as_rows(x), None if weights is None else as_rows(weights)
    fusion = GLU_FLOAT8 if fp8_input_store else GLU
    ctx.backend, ctx.options = fusion.choose_for_function(x), (gating, fp8_input_store, x.device)
    if fp8_input_store:
        y, *kept = GLU_FLOAT8.path(x, ctx.backend)(rows, bias, w, *gating)
    else:
        y, kept = GLU.path(x, ctx.backend)(rows, None, bias, w, *gating), [x]
    saved = [*kept, bias, weights]  # the arguments themselves, not views: autograd then detects writes to them
    ctx.save_for_backward(*(map(_on_cpu, saved) if cpu_offload_input else saved))
    return not_a_view(y.view(*x.shape[:-1], y.shape[-1]))


def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx [..., 2F], and dbias and dw, None if there is no bias or weight."""
    gating, in_float8, device = ctx.options
    saved: list[Any] = [x if x is None else x.to(device, non_blocking=True) for x in ctx.saved_tensors]
    input_or_stored, *scale, bias, weights = saved
    rows, w = as_rows(dy), None if weights is None else as_rows(weights)
    if in_float8:
        dx, dbias, dw = GLU_FLOAT8.backs[ctx.backend](rows, input_or_stored, *scale, bias, w, *gating)
    else:
        dx, _, dbias, dw = GLU.backs[ctx.backend](rows, as_rows(input_or_stored), None, bias, w, *gating)
    of_weights = None if w is None else dw.view(*dy.shape[:-1], 1)
    return dx.view(*dy.shape[:-1], dx.shape[-1]), None if bias is None else dbias, of_weights


def _on_cpu(x: Tensor | None) -> Tensor | None:
    if x is None or x.device.type == "cpu":
        return x
    # pinned, because copies from pageable memory are several times slower
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)
