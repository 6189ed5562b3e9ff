"""Attention compared with torch's cuDNN and flash kernels, at the head sizes of models and of latent attention."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.fusions.clock import Clock
from benchmarks.restartable import Item, Line
from megalith import fusions

__all__ = ["SHAPES", "TINY", "Heads", "attention", "items"]

_REPEATS = 10
_PEERS = {
    "cuda": {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION},
    "cpu": {"math": SDPBackend.MATH},
}


class Heads(NamedTuple):
    """Causal attention over B rows of S tokens; A query heads, G key and value heads, head size D, value size DV."""

    S: int
    B: int
    A: int
    G: int
    D: int
    DV: int

    @property
    def flops(self) -> int:
        """FLOPs of the two matrix products of the forward, halved by the causal mask; the backward has five."""
        return self.S * self.S * self.B * self.A * (self.D + self.DV)


SHAPES = {
    "D 128": Heads(4096, 2, 32, 32, 128, 128),
    "D 64": Heads(4096, 2, 32, 32, 64, 64),
    "MLA, D 192 and 128": Heads(4096, 2, 16, 16, 192, 128),
    "D 128, 8 groups": Heads(4096, 2, 32, 8, 128, 128),
    "D 256": Heads(4096, 1, 16, 16, 256, 256),
}
TINY = Heads(32, 1, 2, 1, 16, 16)


def items(tiny: bool) -> list[Item]:
    """Arguments of ``attention``: one contender at one shape, because any of them may crash its process."""
    shapes, device = ({"D 16": TINY}, "cpu") if tiny else (SHAPES, "cuda")
    return [
        Item(f"{name}, {contender}", (contender, tuple(heads), device))
        for contender in ("Megalith", *_PEERS[device])  # cuDNN last: it takes long to load, and may fail
        for name, heads in shapes.items()
    ]


def attention(contender: str, heads: tuple[int, ...], device: str) -> Line:
    """Seconds and TFLOP/s, forward and backward, in bfloat16; the interpreter computes in float32."""
    shape = Heads(*heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(shape.S, shape.B, num, width, device=device, dtype=dtype).requires_grad_()
        for num, width in ((shape.A, shape.D), (shape.G, shape.D), (shape.G, shape.DV))
    )
    compute = _ours if contender == "Megalith" else functools.partial(_torchs, _PEERS[device][contender])
    out = compute(q, k, v)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout)  # warm-up: compilation and loading are not timed
    del out
    clock, repeats = Clock(device), _REPEATS if device == "cuda" else 1
    forward = clock.seconds(lambda: compute(q, k, v), repeats)
    both = clock.seconds(lambda: torch.autograd.grad(compute(q, k, v), (q, k, v), dout), repeats)
    return {
        "forward_seconds": forward,
        "both_seconds": both,
        "forward_tflops": shape.flops / forward / 1e12,
        "backward_tflops": 2.5 * shape.flops / max(both - forward, 1e-9) / 1e12,
    }


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fusions.fused_attention(q, k, v, backend="triton")[0]


def _torchs(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    compute: Callable[..., Any] = scaled_dot_product_attention
    with sdpa_kernel(kernel):
        out: Tensor = compute(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3)
