"""The paths of attention and of its gradients from given results, and which of them can compute a call."""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.attention import cudnn
from megalith.fusions.attention.flash_for_cpu import gradients_of_part
from megalith.fusions.attention.flash_for_cpu import op as flash_for_cpu
from megalith.fusions.attention.formulas import WIDEST_HEAD, Seen, reference, reference_gradients
from megalith.fusions.core.dispatch import Backend, Fusion, Operand, why_not_forward_mode
from megalith.fusions.core.registry import registered

__all__ = ["CAPPED_FUSION", "CUDNN_FUSION", "FUSION", "Attention", "Fusions", "fusions_of"]

Attention = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, float | None, int, int],
    tuple[Tensor, Tensor],
]
# (dout, q, k, v, out, lse, bounds, scale, softcap, left, right) -> dq, dk, dv
Gradients = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float, float | None, int, int],
    tuple[Tensor, Tensor, Tensor],
]
_Limits = Mapping[Backend, Callable[[Operand], str | None]]


class Fusions(NamedTuple):
    """Attention, and its gradients from given results, for one kind of call."""

    forward: Fusion[Attention]
    gradients: Fusion[Gradients]


def fusions_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    bounds: Tensor | None,
    softcap: float | None,
    left: int,
    right: int,
) -> Fusions:
    """The fusions whose paths can compute this call."""
    if softcap is not None:
        return _CAPPED
    return _CUDNN if cudnn.takes(q, k, v, sink, bounds, left, right) else _GENERAL


def _triton(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *seen: Unpack[Seen]) -> tuple[Tensor, Tensor]:
    from megalith.fusions.attention.kernels.attention import op

    return op(q, k, v, sink, *seen)


def _triton_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *seen: Unpack[Seen]
) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.attention.kernels import attention  # noqa: F401  registers the operators

    out, lse = out.contiguous(), lse.contiguous()  # the layout that forward produces and the kernels expect
    dq, dk, dv, _ = torch.ops.megalith.attention_back(dout, None, q, k, v, None, out, lse, *seen)
    return dq, dk, dv


def _gradients_for_cpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *seen: Unpack[Seen]
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, _ = gradients_of_part(dout, None, q, k, v, None, out, lse, *seen)
    return dq, dk, dv


def _cudnn_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *seen: Unpack[Seen]
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, _ = torch.ops.megalith.attention_cudnn_back(dout, None, q, k, v, None, out, lse, *seen)
    return dq, dk, dv


def _why_not_triton(x: Operand) -> str | None:
    if isinstance(x, Tensor) and x.shape[-1] > WIDEST_HEAD:  # explain() passes no tensor
        return f"its kernels support a head size of at most {WIDEST_HEAD}; got {x.shape[-1]}"
    return None


def _why_not_aten(x: Operand) -> str | None:
    if x.device.type == "cuda":
        return (
            "on a GPU this path is cuDNN's kernels, for 16-bit calls of 256, 512, ... tokens without documents, window "
            "or sink, with head sizes that are multiples of 8, on an H100 or H200"
        )
    if x.device.type != "cpu":
        return f"torch's kernels on {x.device.type} have no gradient for the log-sum-exp"
    return why_not_forward_mode()  # torch's kernels are called inside an operator of ours


def _why_not_cudnn(_: Operand) -> str | None:
    return why_not_forward_mode()


def _why_not_aten_softcap(_: Operand) -> str:
    return "torch's kernels do not support softcap; the full S x S scores of each head are in memory"


_LIMITS: _Limits = {"triton": _why_not_triton, "aten": _why_not_aten}
# no `compile`, which would materialize all scores, and no `blocked`: torch's CPU kernels work in blocks already
_PATHS: Mapping[Backend, Attention] = {"triton": _triton, "aten": flash_for_cpu, "reference": reference}
_GRADIENTS: Mapping[Backend, Gradients] = {
    "triton": _triton_gradients,
    "aten": _gradients_for_cpu,
    "reference": reference_gradients,
}
FUSION = registered(
    Fusion(
        "attention",
        _PATHS,
        _LIMITS,
        defaults={"cuda": ("triton",), "cpu": ("aten",)},
        on_hopper="aten (cuDNN) for the calls that it can compute",
    )
)
_GENERAL = Fusions(FUSION, Fusion("attention", _GRADIENTS, _LIMITS, defaults=FUSION.defaults))


def _with_aten(fusion: Fusion[Any], path: Any) -> Fusion[Any]:
    """``fusion`` for calls that cuDNN takes."""
    limits: _Limits = {**_LIMITS, "aten": _why_not_cudnn}
    return replace(fusion, paths={**fusion.paths, "aten": path}, limits=limits, defaults={"cuda": ("aten",)})


def _without_aten(fusion: Fusion[Any]) -> Fusion[Any]:
    """``fusion`` for capped scores."""
    paths: dict[Backend, Any] = {name: path for name, path in fusion.paths.items() if name != "aten"}
    return replace(fusion, paths=paths, limits={**_LIMITS, "aten": _why_not_aten_softcap})


_CUDNN = Fusions(_with_aten(FUSION, cudnn.op), _with_aten(_GENERAL.gradients, _cudnn_gradients))
_CAPPED = Fusions(_without_aten(FUSION), _without_aten(_GENERAL.gradients))
CAPPED_FUSION, CUDNN_FUSION = _CAPPED.forward, _CUDNN.forward
