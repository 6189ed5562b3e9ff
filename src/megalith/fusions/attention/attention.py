"""Grouped-query attention with sliding window, packed documents and attention sink; also returns the log-sum-exp.

    s_ij = scale q_i . k_j                          for each key j visible to query i
    with a softcap c: s_ij = c tanh(scale q_i . k_j / c)
    lse  = log(sum_j exp(s_ij) + exp(sink))         natural logarithm; the sink term only if there is a sink
    p_ij = exp(s_ij - lse_i);   out_i = sum_j p_ij v_j
    ds   = p (dout . v - delta),   delta_i = dout_i . out_i - dlse_i;   times 1 - (s / c)^2 with a softcap
    dq   = scale ds k;   dk = scale ds^T q;   dv = p^T dout;   dsink = -sum_i exp(sink - lse_i) delta_i

Dao et al. 2022, 2023, "FlashAttention", arXiv:2205.14135, 2307.08691; groups: Ainslie et al. 2023, arXiv:2305.13245;
sink: Xiao et al. 2023, arXiv:2309.17453; softcap: Gemma Team 2024, "Gemma 2", arXiv:2408.00118, section 2.

Query i is aligned with key i + Sk - Sq, so the last query is aligned with the last key. The keys visible to a query
form an interval, determined by the causal mask, the window and the bounds of its document; so do the queries that see a
key. Blocks outside these intervals are skipped.

S sequence, B micro-batch, A query heads, G groups of heads, D head size, Dv that of v. Saved for backward: the inputs,
out and lse. Minimum memory traffic: forward reads q, k, v and writes out and lse; nothing of size S x S is stored.
"""

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.attention.paths import fusions_of
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["attention_gradients", "fused_attention", "key_range"]

_UNBOUNDED = 2**30  # size of an unlimited side of a window; the sum of it and a position fits int32


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns ``softmax(scale q k^T) v`` over the keys visible to each query, and the log-sum-exp of its scores.

    Args:
        q: [Sq, B, A, D], floating point, with any strides.
        k: [Sk, B, G, D], A divisible by G; query head a reads group a // (A / G).
        v: [Sk, B, G, Dv].
        causal: a query sees no key after its own position. The last query is aligned with the last key, so queries
            after a cache of keys are the last positions.
        scale: multiplies the scores, positive; defaults to 1 / sqrt(D).
        window: (left, right), the number of keys visible before and after the query's position; -1 means unlimited.
        packed_seq_params: tokens only see tokens of their own document. Either queries and keys are the same tokens; or
            the queries follow a cache, and the keys are the first Sk tokens of rows that may be longer. The latter has
            no gradient.
        sink: [A], an attention sink: a score per head, not capped, that is part of the denominator but has no value.
        softcap: scores become ``softcap * tanh(score / softcap)``, within ±softcap; positive. torch's CPU kernels do
            not support it, so a CPU takes the reference, which holds all S x S scores of each head in memory.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        out [Sq, B, A, Dv] in the dtype of ``q``, and lse [B, A, Sq] in float32 (float64 for float64), including the
        sink. A query that sees no key has out 0 and lse -inf (or the sink), and contributes no gradient. Both are
        differentiable, so partial results over parts of the keys can be merged.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: a window limit below -1, or one that has no effect because of ``causal``; a scale or a softcap that
            is not positive and finite.
        BackendError: ``backend`` cannot run on ``q``.
    """
    _check(q, k, v, packed_seq_params, sink)
    left, right = key_range(causal, window)
    bounds = _bounds(packed_seq_params, q, k)
    compute = fusions_of(q, k, v, sink, bounds, softcap, left, right).forward.path(_wider(q, v), backend)
    return compute(q, k, v, sink, bounds, _checked_scale(q, scale, softcap), softcap, left, right)


def attention_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dk and dv of the keys ``k``, and their contribution to dq, where ``out`` and ``lse`` cover all keys.

    Attention over parts of the keys, one after another, is merged by ``merge_attention``; this is the backward of one
    part, given the merged result, without recomputing the forward. ``out`` and ``lse`` already include any sink.
    Arguments and errors are those of ``fused_attention``; dout and out are [Sq, B, A, Dv], lse [B, A, Sq]. Not
    differentiable.
    """
    _check(q, k, v, packed_seq_params, None)
    left, right = key_range(causal, window)
    bounds = _bounds(packed_seq_params, q, k)
    compute = fusions_of(q, k, v, None, bounds, softcap, left, right).gradients.path(_wider(q, v), backend)
    return compute(dout, q, k, v, out, lse, bounds, _checked_scale(q, scale, softcap), softcap, left, right)


def key_range(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """The number of keys visible before and after a query's position; if unlimited, more than any row has.

    Raises ConfigError for a window with limits below -1, or one that has no effect because of ``causal``.
    """
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ConfigError(f"window must be (left, right), each a number of keys or -1 for no limit; got {window}")
    if causal and right > 0:
        raise ConfigError(
            f"window must be (left, 0) or (left, -1) with causal=True; got {window}; pass causal=False for later keys"
        )
    left = _UNBOUNDED if left == -1 else min(left, _UNBOUNDED)
    return left, 0 if causal else _UNBOUNDED if right == -1 else min(right, _UNBOUNDED)


def _bounds(packed: PackedSeqParams | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Key interval of each query's document, int32 [B, Sq, 2]."""
    if packed is None or packed.seq_length == q.shape[0]:
        return None if packed is None else packed.document_bounds
    Sq, Sk = q.shape[0], k.shape[0]
    return packed.document_bounds[:, Sk - Sq : Sk].clamp(max=Sk)


def _wider(q: Tensor, v: Tensor) -> Tensor:
    """Returns the tensor with more columns, which decides the path."""
    return q if q.shape[-1] >= v.shape[-1] else v


def _checked_scale(q: Tensor, scale: float | None, softcap: float | None) -> float:
    """Returns the scale, by default 1 / sqrt(D). Raises ConfigError if it or the softcap is not positive and finite."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for name, factor in (("scale", scale), ("softcap", softcap)):
        if factor is not None and not 0.0 < factor < torch.inf:
            raise ConfigError(f"{name} must be positive and finite; got {factor}")
    return scale


def _check(q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams | None, sink: Tensor | None) -> None:
    check_floating(q=q, k=k, v=v, sink=sink)
    if q.dim() != 4 or q.shape[2] == 0 or q.shape[3] == 0:
        raise ShapeError(f"q must be [Sq, B, A, D] with A and D at least 1; got {list(q.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError(f"q, k and v must have the same dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    _, B, A, D = q.shape
    if k.dim() != 4 or k.shape[2] == 0 or A % k.shape[2]:
        raise ShapeError(f"k must be [Sk, B, G, D], where G divides the {A} heads of q; got {list(k.shape)}")
    check_shape("k", k, (k.shape[0], B, k.shape[2], D), "[Sk, B, G, D] with the B and D of q")
    if v.dim() != 4 or v.shape[3] == 0 or v.shape[:3] != k.shape[:3]:
        raise ShapeError(f"v must be {[*k.shape[:3], 'Dv']}, like k, with Dv at least 1; got {list(v.shape)}")
    check_shape("sink", sink, (A,), "one for each head of q")
    if packed is not None:
        _check_documents(packed, q, k, v)
    bounds = None if packed is None else packed.document_bounds
    check_one_device(q=q, k=k, v=v, sink=sink, packed_seq_params=bounds)


def _check_documents(packed: PackedSeqParams, q: Tensor, k: Tensor, v: Tensor) -> None:
    (Sq, B), Sk = q.shape[:2], k.shape[0]
    follows_cache = Sq < Sk <= packed.seq_length or Sq == Sk < packed.seq_length
    if packed.batch_size != B or not (Sq == Sk == packed.seq_length or follows_cache):
        raise ShapeError(
            f"q and k must match packed_seq_params, {packed.batch_size} rows of {packed.seq_length} tokens; "
            f"got q {list(q.shape)} and k {list(k.shape)}"
        )
    if follows_cache and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ShapeError(
            "queries that follow a KV cache have no gradient in packed rows; call this under torch.no_grad()"
        )
