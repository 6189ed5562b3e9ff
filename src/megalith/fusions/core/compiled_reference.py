"""A reference through torch.compile, whose backward can run as often as that of the reference."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megalith.torch_compat import keeping_what_is_saved

__all__ = ["compiled"]

P = ParamSpec("P")
R = TypeVar("R")


def compiled(reference: Callable[P, R]) -> Callable[P, R]:
    """``reference`` of positional arguments through torch.compile, built at the first call."""

    @functools.cache
    def build() -> Callable[..., Any]:
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
    """Runs a compiled function, and its backward under the setting that it was built with.

    torch lets a compiled backward reuse the memory of what was saved, and then run once; without that it still refuses
    to run twice, unless the setting is the same in backward.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Any) -> tuple[Tensor, ...]:
        ctx.leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        with torch.enable_grad(), keeping_what_is_saved():
            results = function(*ctx.leaves)
        ctx.roots = results if isinstance(results, tuple) else (results,)
        outputs = tuple(root.detach() for root in ctx.roots)
        ctx.mark_non_differentiable(*(y for y, root in zip(outputs, ctx.roots, strict=True) if not root.requires_grad))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        pairs = [(root, g) for root, g in zip(ctx.roots, dy, strict=True) if root.requires_grad]
        roots, upstream = zip(*pairs, strict=True)
        wanted = [x for x in ctx.leaves if _needs_gradient(x)]
        with keeping_what_is_saved():
            found = iter(torch.autograd.grad(roots, wanted, upstream, retain_graph=True, allow_unused=True))
        return None, *(next(found) if _needs_gradient(x) else None for x in ctx.leaves)


def _needs_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
