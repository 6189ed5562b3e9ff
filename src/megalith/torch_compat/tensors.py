"""Tensors and operators: products of matrices, and how a call is dispatched.

torch.nn.functional.grouped_mm              torch._grouped_mm in older versions
forward_ad._current_level                   private; whether forward-mode AD is active
torch._C._AutoDispatchBelowAutograd         private; the dispatch state in which an operator's implementation runs
torch._C._any_requires_grad                 private; checks many operands at once
torch.ops.mkldnn._is_mkldnn_bf16_supported  private; whether a CPU multiplies 16-bit numbers natively
torch.ops.mkldnn._linear_pointwise          private; a linear layer by oneDNN, bias included
torch.cuda.is_current_stream_capturing      raises if torch was built without CUDA
torch._subclasses.fake_tensor               private; tensors without memory
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd import forward_ad

__all__ = [
    "DEPENDS_ON_VALUES",
    "any_requires_grad",
    "below_autograd",
    "fake_tensors",
    "forward_mode_is_on",
    "grouped_mm",
    "is_capturing",
    "is_intercepted",
    "linear_in_onednn",
    "multiplies_natively",
]

# the dispatch state in which an operator's implementation runs: autograd records nothing
below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# raised when the values of ``fake_tensors``, which have none, are needed
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

_grouped_mm = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being captured, whose replays reuse every host value passed during capture.

    False while torch.compile traces: torch 2.11 cannot trace the query.
    """
    return (
        not torch.compiler.is_compiling() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


def is_intercepted() -> bool:
    """Returns whether operator calls are intercepted: by torch.compile, a dispatch mode or torch.func.

    Fake tensors, torch.export and selective checkpointing are dispatch modes.
    """
    return torch.compiler.is_compiling() or _num_dispatch_modes() > 0 or _functorch_is_active()


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Returns whether torch's matrix products of a 16-bit ``dtype`` use native instructions of this CPU."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    library = torch.ops.mkldnn
    is_supported = library._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else library._is_mkldnn_fp16_supported
    return bool(is_supported())


def linear_in_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b, computed by oneDNN on the CPU with a single rounding; autograd cannot record it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def forward_mode_is_on() -> bool:
    """Returns whether forward-mode AD (torch.func.jvp or a torch.autograd.forward_ad level) is active."""
    return forward_ad._current_level >= 0


def fake_tensors() -> AbstractContextManager[object]:
    """Inside the block, tensors have shapes but no memory; tensors from outside are treated as such."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Returns products of groups of rows or columns, each ending at one of ``ends`` int32 [E], in the dtype of ``a``.

    [R, n] with [E, n, m] -> [R, m], whose rows after the last group are not written; [m, R] with [R, n] -> [E, m, n].
    """
    y: Tensor = _grouped_mm(a, b, offs=ends)
    return y
