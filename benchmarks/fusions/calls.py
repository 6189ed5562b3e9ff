"""Overhead of a call, on tensors so small that it consists of Python and torch's dispatch.

Launching nothing: an operator whose implementation only allocates, called as Megalith registers it, through torch's
dispatcher, and as a plain ``torch.autograd.Function`` that allocates the same. Launching on no device: the operator
with its kernels, on a CPU, compared with the Function that only allocates. By path: a public function compared with
a plain Function around the same implementations, or on the default path with the formula alone. Training and decoding:
an operation compared with its torch equivalent, with gradients, and for one token without gradients.
"""

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.fusions.clock import Clock
from benchmarks.fusions.launches import launches
from benchmarks.fusions.no_device import can_launch_nowhere, launching_nowhere
from benchmarks.rounds import Spread
from megalith import fusions
from megalith.fusions.attention import formulas as attention
from megalith.fusions.core.registration import Operator
from megalith.fusions.gated import formulas as glu
from megalith.fusions.norm import formulas as norm
from megalith.fusions.rope import formulas as rope

__all__ = ["as_markdown", "measure_calls"]

_REPEATS = 20  # calls per sample, so that the cost of reading the clock is negligible
_H, _A, _D = 512, 8, 64
_PLAIN, _FORMULA, _TORCH = "plain Function", "formula", "torch"
_EPS = 1e-5


@dataclass(frozen=True)
class _Operation:
    """An operator, its kernels and operands; a public function and its torch equivalent, called with ``tensors``."""

    operator: Operator[Any, Any]
    kernels: str  # module, within megalith.fusions, and name of the operator that launches them
    operands: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    ours: Callable[..., Any]
    torchs: Callable[..., Any]


Seconds = Mapping[str, Sequence[float]]  # of each contender, one value per round


def measure_calls(device: str, rounds: int) -> dict[str, Seconds]:
    """Seconds per call, by call and contender."""
    clock, found = Clock("cpu"), {}  # the host's: for tensors this small, no launch waits for the device
    for name, operation in _operations(device).items():
        found[f"{name}, launching nothing"] = _interleaved(clock, rounds, _launching_nothing(name, operation))
        if device == "cpu" and can_launch_nowhere():
            with launching_nowhere():
                calls = _launching_on_no_device(operation)
                found[f"{name}, launching on no device"] = _interleaved(clock, rounds, calls)
        computing = {"Megalith": operation.ours, _TORCH: operation.torchs}
        for title, make in (("training", _training), ("decoding", _decoding)):
            calls = {contender: make(compute, operation.tensors) for contender, compute in computing.items()}
            found[f"{name}, {title}"] = _interleaved(clock, rounds, calls)
    for name, given in launches(device).items():
        bases = {"blocked": (_PLAIN, given.plain)} | ({None: (_FORMULA, given.formula)} if device == "cpu" else {})
        for path, (base, compute) in bases.items():
            pair = {"Megalith": partial(given.ours, backend=path), base: compute}
            calls = {contender: _training(call, given.tensors) for contender, call in pair.items()}
            found[f"{name}, {path or 'default'} path"] = _interleaved(clock, rounds, calls)
    return found


def as_markdown(calls: Mapping[str, Seconds]) -> str:
    """A row for each call: microseconds of the base, and the times of the others relative to it."""
    lines = [
        "### Calls on tiny tensors",
        "",
        "| call | base | us | Megalith, of base [quartiles] | registered operator, of base |",
        "|---" * 5 + "|",
    ]
    for name, seconds in calls.items():
        base = next(one for one in (_PLAIN, _FORMULA, _TORCH) if one in seconds)
        ours, *registered = (
            Spread.of([mine / its for mine, its in zip(values, seconds[base], strict=True)])
            for contender, values in seconds.items()
            if contender != base
        )
        others = "".join(f"{one.median:.2f}" for one in registered)
        spread = f"{ours.median:.2f} [{ours.low:.2f}..{ours.high:.2f}]"
        lines.append(f"| {name} | {base} | {1e6 * statistics.median(seconds[base]):.0f} | {spread} | {others} |")
    return "\n".join(lines) + "\n"


def _interleaved(clock: Clock, rounds: int, calls: Mapping[str, Callable[[], object]]) -> Seconds:
    for call in calls.values():
        call()
    samples = [[clock.seconds(call, _REPEATS) for call in calls.values()] for _ in range(rounds)]
    return dict(zip(calls, zip(*samples, strict=True), strict=True))


def _training(compute: Callable[..., Any], tensors: Sequence[Any]) -> Callable[[], object]:
    """Forward and backward."""
    leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    upstream = [torch.ones_like(y) for y in _roots(compute(*tensors))]
    return lambda: torch.autograd.grad(_roots(compute(*tensors)), leaves, upstream)


def _decoding(compute: Callable[..., Any], tensors: Sequence[Any]) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            compute(*tensors)

    return call


def _roots(results: Any) -> list[Tensor]:
    values = results if isinstance(results, tuple) else (results,)
    return [y for y in values if y.requires_grad]


def _launching_nothing(name: str, operation: _Operation) -> dict[str, Callable[[], object]]:
    """Forward and backward of the operator with only its allocators registered, and of a plain Function likewise."""
    operator = operation.operator
    name = f"nothing_of_{name.replace(' ', '_')}"
    contenders = {
        "Megalith": operator.register(name, operator.outputs, operator.gradients, opaque=True),
        "registered": getattr(torch.ops.megalith, name),
        _PLAIN: _plain(operator),
    }
    return {contender: _training(compute, operation.operands) for contender, compute in contenders.items()}


def _launching_on_no_device(operation: _Operation) -> dict[str, Callable[[], object]]:
    """Forward and backward of the operator, and of a plain Function that launches nothing."""
    module, name = operation.kernels.split(":")
    kernels = getattr(importlib.import_module(f"megalith.fusions.{module}"), name)
    contenders = {"Megalith": kernels, _PLAIN: _plain(operation.operator)}
    return {contender: _training(compute, operation.operands) for contender, compute in contenders.items()}


def _plain(operator: Operator[Any, Any]) -> Callable[..., Any]:
    """A hand-written Function: it saves its input tensors and allocates a gradient for each."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs = operator.outputs(*inputs)
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
            if isinstance(outputs, tuple):
                ctx.mark_non_differentiable(*outputs[operator.num_differentiable :])
            ctx.set_materialize_grads(not operator.absent_as_none)
            return outputs

        @staticmethod
        def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
            gradients = (torch.empty_like(x) for x in ctx.saved_tensors)
            return tuple(next(gradients) if needed else None for needed in ctx.needs_input_grad)

    apply: Callable[..., Any] = Plain.apply
    return apply


def _operations(device: str) -> dict[str, _Operation]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    x, residual, weight, gate_and_up = leaf(1, 1, _H), leaf(1, 1, _H), leaf(_H), leaf(1, 1, 2 * _H)
    q, k, v = (leaf(1, 1, _A, _D) for _ in range(3))
    cos, sin = torch.randn(2, 1, _D // 2, device=device)
    norming = None, None, None, None, 0, 0.0, _EPS, "RMSNorm", False
    return {
        "rms norm": _Operation(
            norm.OPERATOR,
            "norm.kernels.add_norm:op",
            (x, None, weight, *norming),
            (x, weight),
            lambda x, weight: fusions.fused_rms_norm(x, weight, _EPS),
            lambda x, weight: functional.rms_norm(x, (_H,), weight, _EPS),
        ),
        "add and rms norm": _Operation(
            norm.OPERATOR,
            "norm.kernels.add_norm:op",
            (leaf(1, _H), leaf(1, _H), weight, *norming),
            (x, residual, weight),
            lambda x, r, weight: fusions.fused_add_norm(x, r, weight, normalization="RMSNorm", eps=_EPS),
            lambda x, r, weight: (functional.rms_norm(h := x + r, (_H,), weight, _EPS), h),
        ),
        "swiglu": _Operation(
            glu.OPERATOR,
            "gated.kernels.glu:op",
            (leaf(1, 2 * _H), None, None, None, *glu.Gating.of("silu")),
            (gate_and_up,),
            lambda x: fusions.glu(x, activation="silu"),
            lambda x: functional.silu(x[..., :_H]) * x[..., _H:],
        ),
        "rope": _Operation(
            rope.OPERATOR,
            "rope.kernels.rope:op",
            (q, k, cos, sin, None, None, None, "neox", False, 0, [], _EPS, False),
            (q, k),
            lambda q, k: fusions.fused_rope(q, k, cos, sin),
            lambda q, k: tuple(_rotated(x, cos[:, None, None], sin[:, None, None]) for x in (q, k)),
        ),
        "attention": _Operation(
            attention.operator(batch_first=True),
            "attention.kernels.attention:op",
            (q, k, v, None, None, _D**-0.5, None, 1 << 30, 0),
            (q, k, v),
            lambda *qkv: fusions.fused_attention(*qkv)[0],
            lambda *qkv: functional.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in qkv), is_causal=True),
        ),
    }


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
