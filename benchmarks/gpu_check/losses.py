"""Cross entropy of a large vocabulary, of given logits and fused with the projection that computes them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.fusions.clock import Clock, memory_of
from benchmarks.fusions.operation import BASE
from benchmarks.fusions.operations.losses import liger_linear
from benchmarks.fusions.registry import OPERATIONS
from benchmarks.restartable import Item, Line
from megalith import fusions

__all__ = ["Sizes", "items", "losses"]

_OF_LOGITS, _OF_HIDDEN = "cross entropy", "linear + cross entropy"
_UNFUSED = "Megalith, unfused"
_REPEATS = 10


class Sizes(NamedTuple):
    """T tokens, H hidden, V vocabulary."""

    T: int
    H: int
    V: int

    @property
    def flops(self) -> int:
        """FLOPs of the projection, forward and backward; computing logits twice does not count."""
        return 6 * self.T * self.H * self.V


_SIZES, _TINY = Sizes(8192, 4096, 131072), Sizes(16, 8, 256)


def items(tiny: bool) -> list[Item]:
    """Arguments of ``losses``: one contender each, because the logits of several do not fit into memory together."""
    contenders = {_OF_LOGITS: ("Megalith", BASE, "Liger"), _OF_HIDDEN: ("Megalith", _UNFUSED, BASE, "Liger")}
    sizes, device = (_TINY, "cpu") if tiny else (_SIZES, "cuda")
    return [
        Item(f"{operation}, {contender}", (operation, contender, tuple(sizes), device))
        for operation, chosen in contenders.items()
        for contender in (chosen[:1] if tiny else chosen)
    ]


def losses(operation: str, contender: str, sizes: tuple[int, ...], device: str) -> Line:
    """Seconds and peak memory, forward and backward, in bfloat16; the interpreter computes in float32."""
    shape, dtype = Sizes(*sizes), torch.bfloat16 if device == "cuda" else torch.float32
    try:
        compute = _compute(operation, contender)
    except ImportError as error:
        return {"skipped": str(error)}
    torch.manual_seed(0)
    leaves = _leaves(operation, shape, dtype, device)
    target = torch.randint(shape.V, (shape.T,), device=device)
    dloss = torch.full((shape.T,), 1 / shape.T, device=device)

    def forward() -> Tensor:
        loss: Tensor = compute(*leaves, target)
        return loss

    def both() -> None:
        loss = forward()
        torch.autograd.grad(loss, leaves, dloss if loss.dim() else None)

    both()  # warm-up: compilation is not timed
    clock, repeats = Clock(device), _REPEATS if device == "cuda" else 1
    line = {"forward_seconds": clock.seconds(forward, repeats), "both_seconds": clock.seconds(both, repeats)}
    if operation == _OF_HIDDEN:
        line["tflops"] = shape.flops / line["both_seconds"] / 1e12
    return {**line, "peak_bytes": memory_of(both, device).peak, "logits_bytes": shape.T * shape.V * dtype.itemsize}


def _compute(operation: str, contender: str) -> Callable[..., Any]:
    """A function of (logits, target) or of (x, weight, target). Raises ImportError if a peer is not installed."""
    chosen = OPERATIONS[operation]
    if contender == BASE:
        return chosen.eager
    if contender == "Megalith":
        return lambda *inputs: chosen.ours(*inputs, backend="triton")
    if (operation, contender) == (_OF_HIDDEN, "Liger"):
        return liger_linear()
    if contender == _UNFUSED:
        return lambda x, weight, target: fusions.fused_vocab_parallel_cross_entropy(linear(x, weight), target)
    return chosen.peers[contender]()


def _leaves(operation: str, shape: Sizes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """The inputs with a gradient."""
    dims = [(shape.T, shape.V)] if operation == _OF_LOGITS else [(shape.T, shape.H), (shape.V, shape.H)]
    scale = 1.0 if operation == _OF_LOGITS else shape.H**-0.25
    return [(torch.randn(size, device=device, dtype=dtype) * scale).requires_grad_() for size in dims]
