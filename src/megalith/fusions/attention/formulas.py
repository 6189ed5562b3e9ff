"""Formulas of ``attention.attention``, stated there, and functions that merge attention over parts of the keys.

    lse = log(exp(lse_a) + exp(lse_b));   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
    with a sink: out sigmoid(lse - sink)

Dao et al. 2022, arXiv:2205.14135; Liu et al. 2023, "Ring Attention", arXiv:2310.01889; sink: Xiao et al. 2023,
arXiv:2309.17453. Merging is elementwise, in plain torch on every path, and twice differentiable.

S sequence, B micro-batch, A query heads, G groups of heads, D head size, Dv that of v. ``bounds`` int32 [B, S, 2] holds
the first token of each token's document, and the one after its last.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.autocast import without_autocast
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import fresh_like, wide

__all__ = [
    "OPERATOR",
    "WIDEST_HEAD",
    "GivenToBackward",
    "OnScores",
    "Seen",
    "gradients_with_bias",
    "merge_attention",
    "operator",
    "reference",
    "reference_gradients",
    "sink_correction",
    "sink_gradient",
]

WIDEST_HEAD = 256  # largest head size in the kernels' tables of block sizes


class Seen(NamedTuple):
    """The last operands of the operator: which keys a query sees, and how scores are scaled and capped."""

    bounds: Tensor | None  # int32 [B, Sq, 2]
    scale: float
    softcap: float | None
    left: int
    right: int


class GivenToBackward(NamedTuple):
    """Gradients of out and lse, None if these were not used, and what was saved; the last fields are ``Seen``."""

    dout: Tensor | None
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    out: Tensor
    lse: Tensor
    bounds: Tensor | None
    scale: float
    softcap: float | None
    left: int
    right: int

    @property
    def seen(self) -> Seen:
        return Seen(*self[8:])


class OnScores(NamedTuple):
    """Options that only formulas with all scores in memory support."""

    factors: Tensor | None = None  # [B, A, Sq, Sk], multiplies the probabilities: dropout
    bias: Tensor | None = None  # [A, Sq, Sk], added to the scores


_NOTHING_ON_SCORES = OnScores()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *seen: Unpack[Seen],
    on_scores: OnScores = _NOTHING_ON_SCORES,
) -> tuple[Tensor, Tensor]:
    """out and lse, with all scores in memory."""
    bounds, scale, softcap, left, right = seen
    factors, bias = on_scores
    with without_autocast(q):
        acc, groups = wide(q.dtype), k.shape[2]
        hidden = ~_seen(q, k, bounds, left, right)  # [B or 1, 1, Sq, Sk]
        scores = torch.einsum("sbghd,tbgd->bghst", (q.to(acc) * scale).unflatten(2, (groups, -1)), k.to(acc))
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.flatten(1, 2)  # [B, A, Sq, Sk]
        scores = scores if bias is None else scores + bias
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)  # [B, A, Sq]
        if sink is not None:
            lse = torch.logaddexp(lse, sink.to(acc).unsqueeze(-1))
        probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        probs = probs if factors is None else probs * factors
        out = torch.einsum("bghst,tbgd->sbghd", probs.unflatten(1, (groups, -1)), v.to(acc))
        return out.flatten(2, 3).to(q.dtype), lse


def reference_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *seen: Unpack[Seen]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of attention over some of the keys, where ``out`` and ``lse`` cover all of them."""
    return gradients_with_bias(dout, q, k, v, out, lse, *seen)[:3]


def gradients_with_bias(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *seen: Unpack[Seen],
    on_scores: OnScores = _NOTHING_ON_SCORES,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv like ``reference_gradients``, and the gradient of the bias in ``on_scores``, None without one."""
    bounds, scale, softcap, left, right = seen
    factors, bias = on_scores
    with without_autocast(q):
        acc, groups = wide(q.dtype), k.shape[2]
        hidden = ~_seen(q, k, bounds, left, right)  # [B or 1, 1, Sq, Sk]
        q_by_group, dout_by_group = (x.to(acc).unflatten(2, (groups, -1)) for x in (q, dout))  # [Sq, B, G, A/G, D]
        scores = torch.einsum("sbghd,tbgd->bghst", q_by_group * scale, k.to(acc)).flatten(1, 2)  # [B, A, Sq, Sk]
        slope: Tensor | float = 1.0
        if softcap is not None:
            slope = torch.cosh(scores / softcap) ** -2  # 1 - tanh^2 would lose precision by cancellation
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores if bias is None else scores + bias
        probs = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(hidden, 0.0)
        dprobs = torch.einsum("sbghd,tbgd->bghst", dout_by_group, v.to(acc)).flatten(1, 2)  # [B, A, Sq, Sk]
        dprobs = dprobs if factors is None else dprobs * factors
        delta = (dout.to(acc) * out.to(acc)).sum(dim=-1).permute(1, 2, 0)  # [B, A, Sq]
        dscores = (scale * probs * (dprobs - delta.unsqueeze(-1)) * slope).unflatten(
            1, (groups, -1)
        )  # [B, G, A/G, Sq, Sk]
        dbias = None if bias is None else (probs * (dprobs - delta.unsqueeze(-1))).sum(dim=0)  # [A, Sq, Sk]
        weights = (probs if factors is None else probs * factors).unflatten(1, (groups, -1))
        dq = torch.einsum("bghst,tbgd->sbghd", dscores, k.to(acc)).flatten(2, 3)  # [Sq, B, A, D]
        dk = torch.einsum("bghst,sbghd->tbgd", dscores, q_by_group)
        dv = torch.einsum("bghst,sbghd->tbgd", weights, dout_by_group)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


def _seen(q: Tensor, k: Tensor, bounds: Tensor | None, left: int, right: int) -> Tensor:
    """Which keys each query sees: [B, 1, Sq, Sk], or [1, 1, Sq, Sk] without documents."""
    Sq, Sk = q.shape[0], k.shape[0]
    keys = torch.arange(Sk, device=q.device)
    beside = torch.arange(Sk - Sq, Sk, device=q.device).unsqueeze(1)  # [Sq, 1]
    seen = (keys >= beside - left) & (keys <= beside + right)
    if bounds is not None:
        first, end = bounds.unsqueeze(1).unsqueeze(-2).unbind(-1)  # [B, 1, S, 1]
        seen = seen & (keys >= first) & (keys < end)
    return seen.expand(1, 1, Sq, Sk) if bounds is None else seen


def operator(batch_first: bool) -> Operator[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Declares attention; with ``batch_first``, lse and gradients have the memory layout [B, S, heads, ...]."""

    def outputs(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *seen: Unpack[Seen]) -> tuple[Tensor, Tensor]:
        Sq, B, A, _ = q.shape
        strides = (Sq * A, 1, A) if batch_first else (A * Sq, Sq, 1)
        return q.new_empty(Sq, B, A, v.shape[-1]), q.new_empty_strided((B, A, Sq), strides, dtype=wide(q.dtype))

    def gradients(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = GivenToBackward(*inputs)
        like = _like_batch_first if batch_first else fresh_like
        dsink = given.q.new_empty(0) if given.sink is None else fresh_like(given.sink)
        return like(given.q), like(given.k), like(given.v), dsink

    return Operator(
        outputs, gradients, of=("q", "k", "v", "sink"), saves=_saves, num_differentiable=2, absent_as_none=True
    )


def _like_batch_first(x: Tensor) -> Tensor:
    """Uninitialized memory in the shape [S, B, heads, D] of ``x``, laid out as [B, S, heads, D]."""
    S, B, heads, D = x.shape
    return x.new_empty_strided((S, B, heads, D), (heads * D, S * heads * D, D, 1))


def _saves(outputs: tuple[Tensor, ...], *inputs: object) -> tuple[object, ...]:
    return (*inputs[:4], *outputs, *inputs[4:])


OPERATOR = operator(batch_first=False)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combines attention over two sets of keys; a query that sees no key of a set must have lse -inf there.

    Args:
        out_a, out_b: [S, B, A, D].
        lse_a, lse_b: [B, A, S], as returned by ``fused_attention``.

    Returns:
        out [S, B, A, D] in the dtype of ``out_a``, and lse [B, A, S]. To merge many parts, keep ``out_a`` in float32,
        so that the result is rounded only once, at the end.

    Raises:
        ShapeError: the tensors do not fit together.
    """
    check_floating(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_one_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_shape("out_b", out_b, out_a.shape, "like out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_lse(name, lse, out_a)
    acc = wide(out_a.dtype)
    neither = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    ahead = (lse_a - lse_b).masked_fill(neither, 0.0)
    # each branch is exact where it is selected; the clamps keep infinities out of the other branch's gradient
    softplus = torch.nn.functional.softplus
    lse = torch.where(ahead >= 0, lse_a + softplus(-ahead.clamp(min=0)), lse_b + softplus(ahead.clamp(max=0)))
    share = _beside(torch.sigmoid(ahead)).to(acc)
    out = share * out_a.to(acc) + (1.0 - share) * out_b.to(acc)
    return out.to(out_a.dtype), lse


def sink_correction(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Corrects ``out`` and ``lse`` of attention without a sink to those of attention with ``sink`` [A].

    A sink of zero is "off by one": a softmax with 1 added to its denominator. Merge all parts of the keys first,
    because a sink counts once.

    Args:
        out: [S, B, A, D].
        lse: [B, A, S].

    Returns:
        out [S, B, A, D] in its dtype, and lse [B, A, S] including the sink. Where lse is -inf, out is 0.

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


def sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """dsink [A], where ``out`` [S, B, A, D] and ``lse`` [B, A, S] include the sink.

    The sink acts as a key whose value is zero, and its share of the softmax is exp(sink - lse).
    """
    acc = lse.dtype
    delta = (dout.to(acc) * out.to(acc)).sum(dim=-1).permute(1, 2, 0)  # [B, A, Sq]
    share = torch.exp(sink.to(acc).unsqueeze(-1) - lse)
    return (share * (-delta if dlse is None else dlse - delta)).sum(dim=(0, 2)).to(sink.dtype)


def _beside(x: Tensor) -> Tensor:
    """``x`` [B, A, S] as [S, B, A, 1]."""
    return x.permute(2, 0, 1).unsqueeze(-1)


def _check_lse(name: str, lse: Tensor, out: Tensor) -> None:
    S, B, A = out.shape[:3]
    check_shape(name, lse, (B, A, S), f"[B, A, S] of out {list(out.shape)}")
