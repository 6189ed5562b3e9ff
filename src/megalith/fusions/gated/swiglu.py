"""SwiGLU with optional bias and per-token weights: ``megalith.fusions.glu`` under Megatron's names.

    y = silu(gate + bias) * (up + bias) * w        silu(a) = a * sigmoid(a)

Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202. Functions without ``_impl`` are references in plain
torch, on the whole tensor. For memory traffic and what is saved, see ``glu``.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.errors import BackendError
from megalith.fusions.core.dispatch import Backend
from megalith.fusions.core.function_context import Context
from megalith.fusions.gated import functions
from megalith.fusions.gated.formulas import Gating
from megalith.fusions.gated.glu import back, glu, glu_back
from megalith.fusions.gated.glu_float8 import glu_float8

__all__ = [
    "BiasSwiGLUFunction",
    "SwiGLUFunction",
    "WeightedSwiGLUFunction",
    "bias_clamped_swiglu",
    "bias_clamped_swiglu_back",
    "bias_swiglu",
    "bias_swiglu_back",
    "bias_swiglu_impl",
    "clamped_swiglu",
    "clamped_swiglu_back",
    "clamped_weighted_swiglu",
    "clamped_weighted_swiglu_back",
    "swiglu",
    "swiglu_back",
    "weighted_bias_swiglu_impl",
    "weighted_swiglu",
    "weighted_swiglu_back",
]

_SILU = Gating.of("silu")


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    *,
    clamp_value: float | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Returns SwiGLU of gate and up packed in ``input``.

    Args:
        input: [..., 2F], floating point: gate, then up.
        bias: [2F], or None.
        fp8_input_store: save the input for backward in 8 bits, with a scale per token; see ``glu_float8``.
        cpu_offload_input: offload the tensors saved for backward to CPU memory, pinned if they come from a GPU. Has no
            effect for input on a CPU. torch.compile cannot trace it: it breaks the graph, or raises under
            fullgraph.
        clamp_value: upper bound of the gate, and bound of up on both sides, applied after the bias.
        interleaved: the columns of ``input`` and ``bias`` alternate between gate and up.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., F] in the dtype of ``input``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: a clamp that is not positive.
        BackendError: ``backend`` cannot run on ``input``; or ``cpu_offload_input`` inside torch.compile.
    """
    compute = glu_float8 if fp8_input_store else glu
    with _saved_on_cpu(input) if cpu_offload_input else nullcontext():
        return compute(input, activation="silu", bias=bias, clamp=clamp_value, interleaved=interleaved, backend=backend)


def weighted_bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    *,
    clamp_value: float | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Returns SwiGLU times one weight per token, ``weights`` [..., 1]: the router's probability, often in float32.

    The other arguments, the result and the errors are those of ``bias_swiglu_impl``.
    """
    compute = glu_float8 if fp8_input_store else glu
    return compute(
        input,
        activation="silu",
        bias=bias,
        weights=weights,
        clamp=clamp_value,
        interleaved=interleaved,
        backend=backend,
    )


def swiglu(y: Tensor) -> Tensor:
    """Returns ``silu(gate) * up`` [..., F] for ``y`` [..., 2F]."""
    return glu(y, activation="silu", backend="reference")


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """Returns ``swiglu`` of ``y + bias``; the sum is not rounded."""
    return glu(y, activation="silu", bias=bias, backend="reference")


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """``swiglu(y) * weights``, with one weight [..., 1] per token, in the dtype of ``y``."""
    return glu(y, activation="silu", weights=weights, backend="reference")


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F], given the upstream gradient ``g`` [..., F]."""
    return glu_back(g, y, activation="silu")[0]


def bias_swiglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F]; the gradient of ``bias`` is its sum over tokens."""
    return glu_back(g, y, activation="silu", bias=bias)[0]


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``y`` [..., 2F] and of ``weights`` [..., 1], each in the dtype of its tensor."""
    dy, _, _, dw = back(g, y, None, None, weights, Gating.of("silu"))
    return dy, dw


def clamped_swiglu(y: Tensor, clamp_value: float) -> Tensor:
    """Returns ``swiglu`` with the gate clamped to at most ``clamp_value`` and up to [-clamp_value, clamp_value]."""
    return glu(y, activation="silu", clamp=clamp_value, backend="reference")


def bias_clamped_swiglu(y: Tensor, bias: Tensor, clamp_value: float) -> Tensor:
    """Returns ``clamped_swiglu`` of ``y + bias``; the sum is not rounded."""
    return glu(y, activation="silu", bias=bias, clamp=clamp_value, backend="reference")


def clamped_weighted_swiglu(y: Tensor, weights: Tensor, clamp_value: float) -> Tensor:
    """``clamped_swiglu(y) * weights``, with one weight [..., 1] per token, in the dtype of ``y``."""
    return glu(y, activation="silu", weights=weights, clamp=clamp_value, backend="reference")


def clamped_swiglu_back(g: Tensor, y: Tensor, clamp_value: float) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F], given ``g`` [..., F]; it is not masked at the bounds."""
    return glu_back(g, y, activation="silu", clamp=clamp_value)[0]


def bias_clamped_swiglu_back(g: Tensor, y: Tensor, bias: Tensor, clamp_value: float) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F]; the gradient of ``bias`` is its sum over tokens."""
    return glu_back(g, y, activation="silu", bias=bias, clamp=clamp_value)[0]


def clamped_weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor, clamp_value: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``y`` [..., 2F] and of ``weights`` [..., 1], each in the dtype of its tensor."""
    dy, _, _, dw = back(g, y, None, None, weights, Gating.of("silu", clamp=clamp_value))
    return dy, dw


class SwiGLUFunction(torch.autograd.Function):
    """``apply(input, fp8_input_store, cpu_offload_input)`` is ``bias_swiglu_impl`` without a bias."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Tensor:
        return functions.forward(ctx, input, None, None, _SILU, fp8_input_store, cpu_offload_input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None]:
        dx, _, _ = functions.backward(ctx, grad_output)
        return dx, None, None


class BiasSwiGLUFunction(torch.autograd.Function):
    """``apply(input, bias, fp8_input_store, cpu_offload_input)`` is ``bias_swiglu_impl``."""

    @staticmethod
    def forward(
        ctx: Context,
        input: Tensor,
        bias: Tensor | None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> Tensor:
        return functions.forward(ctx, input, bias, None, _SILU, fp8_input_store, cpu_offload_input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        dx, dbias, _ = functions.backward(ctx, grad_output)
        return dx, dbias, None, None


class WeightedSwiGLUFunction(torch.autograd.Function):
    """``apply(input, weights, fp8_input_store)`` is ``weighted_bias_swiglu_impl`` without a bias."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, weights: Tensor, fp8_input_store: bool = False) -> Tensor:
        return functions.forward(ctx, input, None, weights, _SILU, fp8_input_store)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None]:
        dx, _, dw = functions.backward(ctx, grad_output)
        return dx, dw, None


def _saved_on_cpu(x: Tensor) -> AbstractContextManager[object]:
    """Context that offloads tensors saved by autograd to CPU memory, and copies them back when backward needs them."""
    if torch.compiler.is_compiling():
        raise BackendError(functions.REFUSED_OFFLOAD)
    # pinned, because copies from pageable memory are several times slower
    return torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda)
