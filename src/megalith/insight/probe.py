"""Measures which dtype trains a model fastest on this machine.

Times the repeated parts of a step: forward and backward of one layer (matmuls, causal attention, the gate) and of the
output head with its loss, with float32 master weights that are cast for use and gradients that are cast back. The time
of the layer is multiplied by L. Rounds alternate between the dtypes, so that a slow-down of the machine affects all.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention, silu

from megalith.config import TransformerConfig
from megalith.observe.units import duration

__all__ = ["DtypeProbe", "fastest", "probe_dtype"]

Step = Callable[[], object]

_ROUNDS = 7
_WORTH_IT = 1.05  # minimum speed-up over float32 for a dtype of lower precision


@dataclass(frozen=True)
class DtypeProbe:
    """The dtype to train in, and the measured seconds of a micro-batch's forward and backward by dtype."""

    dtype: str
    seconds: Mapping[str, float]

    @property
    def line(self) -> str:
        """One line that explains the choice, with timings."""
        taken = self.seconds[self.dtype]
        others = [
            f"{duration(seconds)} in {dtype} ({seconds / taken:.2f}x as long)"
            for dtype, seconds in self.seconds.items()
            if dtype != self.dtype
        ]
        fastest = min(self.seconds.values()) == taken
        why = (
            "the fastest on this machine"
            if fastest
            else f"no other is more than {_WORTH_IT - 1:.0%} faster on this machine"
        )
        return f"dtype {self.dtype}, {why}: a micro-batch takes {duration(taken)}, compared with {' and '.join(others)}"


def probe_dtype(
    config: TransformerConfig,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    *,
    device: torch.device | str = "cpu",
    num_threads: int | None = None,
) -> DtypeProbe:
    """Times float32 and bfloat16, and on an accelerator also float16, on micro-batches of this shape.

    ``num_threads`` is the number of threads of one rank, if several ranks share the machine's cores.
    """
    device = torch.device(device)
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type != "cpu" else [])
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads or threads_before)
    try:
        layer = {dtype: _layer_step(config, seq_length, micro_batch_size, dtype, device) for dtype in dtypes}
        head = {dtype: _head_step(config, vocab_size, seq_length * micro_batch_size, dtype, device) for dtype in dtypes}
        layer_seconds, head_seconds = _interleaved(layer, device), _interleaved(head, device)
    finally:
        torch.set_num_threads(threads_before)
    seconds = {
        str(dtype).removeprefix("torch."): config.num_layers * layer_seconds[dtype] + head_seconds[dtype]
        for dtype in dtypes
    }
    return DtypeProbe(fastest(seconds), seconds)


def fastest(seconds: Mapping[str, float]) -> str:
    """The dtype with the least ``seconds``; float32, the most precise, unless that one is at least 5 % faster."""
    best = min(seconds, key=lambda dtype: seconds[dtype])
    return best if seconds["float32"] >= _WORTH_IT * seconds[best] else "float32"


def _interleaved(steps: Mapping[torch.dtype, Step], device: torch.device) -> dict[torch.dtype, float]:
    """The minimum seconds of each step over alternating rounds; other load on the machine only adds time."""
    best = dict.fromkeys(steps, math.inf)
    for _ in range(_ROUNDS):
        for dtype, step in steps.items():
            _wait(device)
            start = perf_counter()
            step()
            _wait(device)
            best[dtype] = min(best[dtype], perf_counter() - start)
    return best


def _layer_step(config: TransformerConfig, S: int, B: int, dtype: torch.dtype, device: torch.device) -> Step:
    A, G, D = config.num_attention_heads, config.num_query_groups, config.kv_channels
    H, F = config.hidden_size, config.ffn_hidden_size
    gated = config.gate_activation is not None
    shapes = [(A * D, H), (G * D, H), (G * D, H), (H, A * D), (H, F), (F, H), *([(F, H)] if gated else [])]
    weights = [torch.randn(shape, device=device).div_(H**0.5).requires_grad_() for shape in shapes]
    x = torch.randn(S, B, H, device=device).to(dtype).requires_grad_()

    def step() -> object:
        q, k, v, o, down, up, *gate = (weight.to(dtype) for weight in weights)
        query, key, value = (linear(x, w).view(S, B, -1, D).permute(1, 2, 0, 3) for w in (q, k, v))  # [B, A or G, S, D]
        context = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=G != A)
        y = x + linear(context.permute(2, 0, 1, 3).reshape(S, B, A * D), o)  # [S, B, H]
        inner = silu(linear(y, gate[0])) * linear(y, up) if gated else gelu(linear(y, up))  # [S, B, F]
        y = y + linear(inner, down)
        return torch.autograd.grad(y, (x, *weights), torch.ones_like(y))

    return step


def _head_step(config: TransformerConfig, V: int, T: int, dtype: torch.dtype, device: torch.device) -> Step:
    H = config.hidden_size
    weight = torch.randn(V, H, device=device).div_(H**0.5).requires_grad_()
    x = torch.randn(T, H, device=device).to(dtype).requires_grad_()
    labels = torch.randint(V, (T,), device=device)

    def step() -> object:
        logits = linear(x, weight.to(dtype)).float()  # [T, V]
        return torch.autograd.grad(cross_entropy(logits, labels), (x, weight))

    return step


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
