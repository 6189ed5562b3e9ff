"""Attention on an H100 or H200: cuDNN's kernels through torch's operators, for calls that these can compute.

They keep a log-sum-exp and read it and ``out`` in backward, as ours do, so backward also works for part of the keys.
They have no gradient for the log-sum-exp, and add the parts of dq in no fixed order. If that gradient is needed, or
torch is in deterministic mode (``train.deterministic``), backward runs our kernels on what cuDNN saved.

cuDNN prepares each new length for some 75 ms, in forward and again in backward. Training repeats its lengths; prompts
do not, so only multiples of ``_LENGTHS`` come here.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Unpack

import torch
from torch import Tensor

from megalith.fusions.attention.formulas import OPERATOR, GivenToBackward, Seen
from megalith.fusions.core.devices import is_hopper
from megalith.fusions.core.rows import contiguous_columns

__all__ = ["op", "takes"]

_VERSION = 91900  # the oldest one on which this was measured
_WIDEST_HEAD = 256
_COLUMNS = 8  # head sizes must be multiples of this
_LENGTHS = 256  # shorter rows gain nothing
_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def takes(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bounds: Tensor | None, left: int, right: int) -> bool:
    """Whether cuDNN computes this call, and faster than our kernels."""
    if not q.is_cuda or q.element_size() != 2 or sink is not None or bounds is not None or q.numel() == 0:
        return False
    (Sq, _, _, D), Sk, Dv = q.shape, k.shape[0], v.shape[-1]
    if Sq % _LENGTHS or Sk % _LENGTHS or D % _COLUMNS or Dv % _COLUMNS or max(D, Dv) > _WIDEST_HEAD:
        return False
    return _is_causal(Sq, Sk, left, right) is not None and is_hopper(q.device) and _is_there()


def _is_causal(Sq: int, Sk: int, left: int, right: int) -> bool | None:
    """Whether queries see no later key, or False if each sees all keys; None if something else is hidden."""
    if left < Sk - 1:
        return None
    return False if right >= Sq - 1 else True if right == 0 and Sq == Sk else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile cannot trace these queries
def _is_there() -> bool:
    return torch.backends.cudnn.is_available() and (torch.backends.cudnn.version() or 0) >= _VERSION


def _forward(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, *seen: Unpack[Seen]) -> tuple[Tensor, Tensor]:
    given = Seen(*seen)
    causal = bool(_is_causal(q.shape[0], k.shape[0], given.left, given.right))
    out, lse, *_statistics = _FORWARD(*map(_heads_first, (q, k, v)), None, True, 0.0, causal, False, scale=given.scale)
    out = out.permute(2, 0, 1, 3).contiguous()  # it has the memory layout of q already
    view = torch.ops.aten._unsafe_view.default  # not tracked as a view, which could not be written into
    return view(out, out.shape), view(lse, lse.shape[:3])


def _backward(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = GivenToBackward(*inputs)
    q, k, v, dout = given.q, given.k, given.v, given.dout
    if dout is None or given.dlse is not None or torch.are_deterministic_algorithms_enabled():
        from megalith.fusions.attention.kernels.attention import op as kernels

        saved = given._replace(out=given.out.contiguous(), lse=given.lse.contiguous())
        return kernels.back.implementation(*saved)
    seed = offset = q.new_empty((), dtype=torch.int64)  # of dropout, of which there is none
    causal = bool(_is_causal(q.shape[0], k.shape[0], given.left, given.right))
    gradients = _BACKWARD(
        *map(_heads_first, (dout, q, k, v, given.out)), given.lse.contiguous().unsqueeze(-1),
        seed, offset, None, None, None, q.shape[0], k.shape[0], 0.0, causal, scale=given.scale,
    )  # fmt: skip
    dq, dk, dv = (dx.permute(2, 0, 1, 3).contiguous() for dx in gradients)
    return dq, dk, dv, q.new_empty(0)


def _heads_first(x: Tensor) -> Tensor:
    """``x`` [S, B, heads, D] as [B, heads, S, D], columns contiguous."""
    return contiguous_columns(x).permute(1, 2, 0, 3)


op = OPERATOR.register("attention_cudnn", _forward, _backward, opaque=True)
