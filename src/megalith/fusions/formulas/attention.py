"""What joins attention over parts of the keys, and adds a sink to what is joined: elementwise, from out and lse.

    lse = log(exp(lse_a) + exp(lse_b));   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
    with a sink: out sigmoid(lse - sink)

Dao et al. 2022, arXiv:2205.14135; Liu et al. 2023, "Ring Attention", arXiv:2310.01889; sink: Xiao et al. 2023,
arXiv:2309.17453. Plain torch on every path, differentiable twice. S sequence, B micro-batch, A heads, D head size.
"""

import torch
from torch import Tensor

from megalith.fusions.formulas.checks import check_floating, check_one_device, check_shape
from megalith.fusions.formulas.rows import wide

__all__ = ["merge_attention", "sink_correction"]


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each; a query that sees none of a set has lse -inf there.

    Args:
        out_a, out_b: [S, B, A, D].
        lse_a, lse_b: [B, A, S], as ``fused_attention`` gives them.

    Returns:
        out [S, B, A, D] in the dtype of ``out_a``, and lse [B, A, S]. To merge many parts, keep ``out_a`` in float32:
        then it is rounded once, at the end.

    Raises:
        ShapeError: the tensors do not fit together.
    """
    check_floating(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_one_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_shape("out_b", out_b, out_a.shape, "as out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_lse(name, lse, out_a)
    acc = wide(out_a.dtype)
    neither = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    ahead = (lse_a - lse_b).masked_fill(neither, 0.0)
    # each branch is exact where it is taken, and keeps infinities out of the other's gradient
    softplus = torch.nn.functional.softplus
    lse = torch.where(ahead >= 0, lse_a + softplus(-ahead.clamp(min=0)), lse_b + softplus(ahead.clamp(max=0)))
    share = _beside(torch.sigmoid(ahead)).to(acc)
    out = share * out_a.to(acc) + (1.0 - share) * out_b.to(acc)
    return out.to(out_a.dtype), lse


def sink_correction(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of attention without a sink, turned into those of attention with ``sink`` [A].

    Zero is "off by one": a softmax with 1 added to its sum. Merge all parts of the keys first: a sink counts once.

    Args:
        out: [S, B, A, D].
        lse: [B, A, S].

    Returns:
        out [S, B, A, D] in its dtype, and lse [B, A, S] that counts the sink. Where lse is -inf, out is 0.

    Raises:
        ShapeError: the tensors do not fit together.
    """
    check_floating(out=out, lse=lse, sink=sink)
    check_one_device(out=out, lse=lse, sink=sink)
    _check_lse("lse", lse, out)
    check_shape("sink", sink, out.shape[2:3], f"one for each head of out {list(out.shape)}")
    acc, score = wide(out.dtype), sink.to(lse.dtype).unsqueeze(-1)
    share = _beside(torch.sigmoid(lse - score)).to(acc)
    return (share * out.to(acc)).to(out.dtype), torch.logaddexp(lse, score)


def _beside(x: Tensor) -> Tensor:
    """``x`` [B, A, S] as [S, B, A, 1]."""
    return x.permute(2, 0, 1).unsqueeze(-1)


def _check_lse(name: str, lse: Tensor, out: Tensor) -> None:
    S, B, A = out.shape[:3]
    check_shape(name, lse, (B, A, S), f"[B, A, S] of out {list(out.shape)}")
