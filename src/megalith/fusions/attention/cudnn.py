"""Attention on an H100 or H200: cuDNN's kernels through torch's operators, for calls that these can compute.

They keep a log-sum-exp and read it and ``out`` in backward, as ours do, so backward also works for part of the keys.
They have no gradient for the log-sum-exp, and add the parts of dq in no fixed order. If that gradient is needed, or
torch is in deterministic mode (``train.deterministic``), backward runs our kernels on what cuDNN saved.

cuDNN prepares each new shape for 50 to 80 ms, in forward and again in backward. Training repeats its shapes; prompts do
not, so only lengths that are multiples of ``_LENGTHS`` come here.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Literal, Unpack

import torch
from torch import Tensor

from megalith.fusions.attention.formulas import OPERATOR, GivenToBackward, Seen
from megalith.fusions.core.devices import is_hopper

__all__ = ["op", "takes"]

_VERSION = 91900  # the oldest one on which this was measured
_ANY_HEAD, _WIDEST_HEAD, _LATENT = 128, 256, (192, 128)  # wider heads: q and v alike, or those of latent attention
_COLUMNS = 8  # head sizes must be multiples of this
_LENGTHS = 256  # shorter rows gain little
_ALIGNMENT = 16  # bytes
_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_Mask = Literal["causal", "full"]


def takes(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bounds: Tensor | None, left: int, right: int) -> bool:
    """Whether cuDNN computes this call, and faster than our kernels."""
    if q.element_size() != 2 or sink is not None or bounds is not None or not is_hopper(q.device) or not _is_there():
        return False
    if torch.compiler.is_exporting():  # lengths may be dynamic
        return False
    (Sq, _, _, D), Sk, Dv = q.shape, k.shape[0], v.shape[-1]
    if q.numel() == 0 or Sk == 0 or Sq % _LENGTHS or Sk % _LENGTHS or D % _COLUMNS or Dv % _COLUMNS:
        return False
    if max(D, Dv) > _ANY_HEAD and (D, Dv) != _LATENT and not D == Dv <= _WIDEST_HEAD:
        return False
    return _mask(Sq, Sk, left, right) is not None


def _mask(Sq: int, Sk: int, left: int, right: int) -> _Mask | None:
    """Which keys queries see, earlier ones or all; None if cuDNN cannot express it."""
    if left < Sk - 1:
        return None
    if right >= Sq - 1:
        return "full"
    return "causal" if right == 0 and Sq == Sk else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile cannot trace these queries
def _is_there() -> bool:
    return torch.backends.cudnn.is_available() and (torch.backends.cudnn.version() or 0) >= _VERSION


def _is_causal(q: Tensor, k: Tensor, seen: Seen) -> bool:
    mask = _mask(q.shape[0], k.shape[0], seen.left, seen.right)
    refused = mask is None or seen.bounds is not None or seen.softcap is not None
    assert not refused, "takes() should have refused this call"
    return mask == "causal"


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *seen: Unpack[Seen]) -> tuple[Tensor, Tensor]:
    given = Seen(*seen)
    assert sink is None, "takes() should have refused this call"
    out, lse, *_statistics = _FORWARD(
        *map(_heads_first, (q, k, v)), None, True, 0.0, _is_causal(q, k, given), False, scale=given.scale
    )
    out = out.permute(2, 0, 1, 3).contiguous()  # it has the memory layout of q already
    view = torch.ops.aten._unsafe_view.default  # not tracked as a view, which could not be written into
    return view(out, out.shape), view(lse, lse.shape[:3])


def _backward(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = GivenToBackward(*inputs)
    q, k, v, dout, out, lse = given.q, given.k, given.v, given.dout, given.out.contiguous(), given.lse.contiguous()
    if dout is None or given.dlse is not None or torch.are_deterministic_algorithms_enabled():
        from megalith.fusions.attention.kernels.attention import op as kernels

        return kernels.back.implementation(*given._replace(out=out, lse=lse))
    # torch reuses what cuDNN prepared for any dout and out, whatever their strides, so they always have the same
    tensors = *map(_heads_first, (dout.contiguous(), q, k, v)), out.permute(1, 2, 0, 3)
    seed = offset = q.new_empty((), dtype=torch.int64)  # of dropout, of which there is none
    gradients = _BACKWARD(
        *tensors, lse.unsqueeze(-1), seed, offset, None, None, None, q.shape[0], k.shape[0], 0.0,
        _is_causal(q, k, given.seen), scale=given.scale,
    )  # fmt: skip
    dq, dk, dv = (dx.permute(2, 0, 1, 3).contiguous() for dx in gradients)
    return dq, dk, dv, q.new_empty(0)


def _heads_first(x: Tensor) -> Tensor:
    """``x`` [S, B, heads, D] as [B, heads, S, D], with contiguous columns and aligned rows; copied if it is neither."""
    columns = _ALIGNMENT // x.element_size()
    is_aligned = x.stride(-1) == 1 and x.data_ptr() % _ALIGNMENT == 0
    if not is_aligned or any(stride == 0 or stride % columns for stride in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.permute(1, 2, 0, 3)


op = OPERATOR.register("attention_cudnn", _forward, _backward, opaque=True)
