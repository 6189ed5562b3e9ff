"""Compiles a reference with torch.compile such that backward can run more than once, as in eager mode."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megalith.fusions.core.compiled_formulas import announce_wait
from megalith.torch_compat.compiler import keeping_what_is_saved

__all__ = ["compiled"]

P = ParamSpec("P")
R = TypeVar("R")


def compiled(reference: Callable[P, R]) -> Callable[P, R]:
    """``reference``, a function of positional arguments, through torch.compile; compiled at the first call."""

    @functools.cache
    def build() -> Callable[..., Any]:
        announce_wait()
        return torch.compile(reference, dynamic=True)

    def run(*args: P.args, **_: P.kwargs) -> R:
        result: R
        if torch.is_grad_enabled() and any(_needs_gradient(x) for x in args):
            results = _KeepingItsGraph.apply(build(), *args)
            result = results[0] if len(results) == 1 else results
        else:
            result = build()(*args)
        return result

    return run


class _KeepingItsGraph(torch.autograd.Function):
    """Runs a compiled function, and its backward under the setting that it was compiled with.

    By default torch lets a compiled backward reuse the memory of saved tensors, so that it can run only once. With that
    disabled, torch still refuses a second backward unless the setting is the same in backward. The tensors that the
    compiled function saves are therefore saved by this Function: autograd frees them as for any operation, and
    activation checkpointing sees them and recomputes them once.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Any) -> tuple[Tensor, ...]:
        saved: list[Tensor] = []
        ctx.unpacked = unpacked = list[Tensor]()

        def pack(x: Tensor) -> int:
            saved.append(x)
            return len(saved) - 1

        with torch.enable_grad(), keeping_what_is_saved(), saved_tensors_hooks(pack, unpacked.__getitem__):
            # views, so that the inner backward stops here: hooks on the inputs themselves run once, outside
            given = [x.view_as(x) if _needs_gradient(x) else x for x in inputs]
            results = function(*given)
        roots = results if isinstance(results, tuple) else (results,)
        ctx.starts, ctx.ends = ([_edge(x) for x in side] for side in (given, roots))
        outputs = tuple(root.detach() for root in roots)
        ctx.save_for_backward(*saved)
        saved.clear()  # the compiled function's graph keeps `pack` alive
        ctx.mark_non_differentiable(*(y for y, end in zip(outputs, ctx.ends, strict=True) if end is None))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        pairs = [(end, g) for end, g in zip(ctx.ends, dy, strict=True) if end is not None]
        ends, upstream = zip(*pairs, strict=True)
        starts = [start for start in ctx.starts if start is not None]
        ctx.unpacked.extend(ctx.saved_tensors)
        try:
            with keeping_what_is_saved():
                found = iter(torch.autograd.grad(ends, starts, upstream, retain_graph=True, allow_unused=True))
        finally:
            ctx.unpacked.clear()
        return None, *(None if start is None else next(found) for start in ctx.starts)


def _edge(x: object) -> GradientEdge | None:
    """The edge at which the gradient of ``x`` enters its graph; it holds no tensor."""
    return get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None


def _needs_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
