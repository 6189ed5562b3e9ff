"""The bytes an operation must move and save: a lower bound on its time, and a limit enforced by its tests.

Forward and backward count every tensor once, however many programs read or write it. Vectors shared by all rows (bias,
gain) are counted once too; a GPU keeps them in its L2 cache. ``saved`` stays allocated from forward to backward.
``visits``: how often one address of a row may be accessed; 1, unless a row is read again.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.fusions.core.rows import rows_per_sum
from megalith.fusions.norm.formulas import rows_per_program
from megalith.fusions.quantization.quantized import LAYOUTS, outputs_of

__all__ = [
    "Cost",
    "adamw",
    "add_norm",
    "attention",
    "aux_loss_scores",
    "bias_dropout_add",
    "bias_gelu",
    "glu",
    "glu_float8",
    "indices_to_multihot",
    "masked_softmax",
    "mla_rope_kv",
    "multihot_to_indices",
    "norm",
    "pad_routing_map",
    "partial_sums",
    "permute",
    "quantize",
    "rope",
    "row_map",
    "topk_router",
    "unpermute",
    "vocab_parallel_cross_entropy",
    "weighted_squared_relu",
]


class Cost(NamedTuple):
    """Bytes of one call. Divided by the copy bandwidth, the first two are lower bounds on its time."""

    forward: int
    backward: int
    saved: int
    forward_visits: int = 1
    backward_visits: int = 1


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    num_statistics: int,
) -> Cost:
    """Reads x and residual and writes y and h; backward reads dy, dh and h, and writes dx, and dresidual if it differs.

    With dropout, both also read the key and the token ids. h and the statistics are saved.
    """
    statistics, mask = 4 * num_statistics * x.shape[0], 0 if tokens is None else 8 + tokens.nbytes
    kept = residual.nbytes + _bytes((weight,)) + statistics + mask
    dresidual = residual.nbytes if mask or x.dtype != residual.dtype else 0
    return Cost(
        forward=2 * x.nbytes + residual.nbytes + _bytes((bias, input_bias)) + kept,
        backward=2 * x.nbytes
        + residual.nbytes
        + dresidual
        + kept
        + _partial_sums_of_norm(x, (weight, bias, input_bias)),
        saved=kept,
    )


def adamw(weight: Tensor, grad: Tensor, copy: Tensor | None, num_tensors: int) -> Cost:
    """Reads gradients, reads and writes weights and moments, writes the weight copies: 30 bytes per parameter.

    Every program looks up its tensor in a table of seven numbers per tensor.
    """
    chunks = num_tensors * -(-weight.numel() // num_tensors // 8192)
    moved = grad.nbytes + 6 * weight.nbytes + (0 if copy is None else copy.nbytes)
    return Cost(forward=moved + 7 * 8 * num_tensors, backward=0, saved=0, forward_visits=chunks)


def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, documents: bool = False) -> Cost:
    """Reads q, k and v and writes out and lse; backward reads all of these, dout and dlse, and writes dq, dk and dv.

    Each block of queries of each head reads the keys again, and each block of keys the queries. A block is 64 tokens.
    """
    (Sq, B, A, _D), (Sk, _, G, Dv) = q.shape, v.shape
    given, out, lse = _bytes((q, k, v, sink)), Sq * B * A * Dv * q.element_size(), 4 * B * A * Sq
    bounds = 8 * B * Sq if documents else 0
    of_queries, of_keys = A // G * -(-Sq // 64), -(-Sk // 64)
    return Cost(
        forward=given + bounds + out + lse,
        backward=2 * given + bounds + 2 * out + 4 * lse,  # lse, dlse, and delta, which is written and read
        saved=given + bounds + out + lse,
        forward_visits=of_queries,
        backward_visits=max(of_queries, of_keys) + 2,
    )


def aux_loss_scores(logits: Tensor) -> Cost:
    """Reads logits and writes float32 scores and a one-byte map; backward reads dscores and logits."""
    E = logits.numel()
    return Cost(forward=logits.nbytes + 5 * E, backward=4 * E + 2 * logits.nbytes, saved=logits.nbytes)


def bias_dropout_add(
    x: Tensor, residual: Tensor, tokens: Tensor | None = None, bias: Tensor | None = None, *, p: float
) -> Cost:
    """Reads x, residual and bias and writes y; backward reads dy and writes dx, or reads dy for dbias, or does nothing.

    With dropout, both also read the key and the token ids, the only tensors saved.
    """
    mask = 0 if p == 0.0 else 8 + _bytes((tokens,))
    dx = 0 if p == 0.0 and x.dtype == residual.dtype else x.nbytes
    dbias = 0 if bias is None else partial_sums(x.shape[0], bias.numel())
    backward = residual.nbytes + dx + dbias if dx or dbias else 0
    return Cost(
        forward=_bytes((x, bias, residual)) + residual.nbytes + mask,
        backward=backward + mask,
        saved=mask,
    )


def bias_gelu(input: Tensor, bias: Tensor | None = None) -> Cost:
    """Reads x and writes y; backward reads dy and x, and writes dx."""
    x, b = input.nbytes, _bytes((bias,))
    sums = 0 if bias is None else partial_sums(input.shape[0], bias.numel())
    return Cost(forward=2 * x + b, backward=3 * x + b + sums, saved=x + b)


def glu(x: Tensor, up: Tensor | None = None, bias: Tensor | None = None, weights: Tensor | None = None) -> Cost:
    """Reads gate and up and writes y; backward reads dy, gate and up, and writes the gradients of both."""
    read = _bytes((x, up, bias, weights))
    y = _bytes((x, up)) // 2
    sums = 0 if bias is None else partial_sums(x.shape[0], bias.numel())
    return Cost(forward=read + y, backward=2 * read + y + sums, saved=read)


def glu_float8(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None) -> Cost:
    """As ``glu``, but also writes x in 8 bits and a scale per row, which backward reads instead of x.

    Forward reads a row twice, for its maximum and to store it; the second read hits the cache.
    """
    stored = x.numel() + 4 * x.shape[0]
    small = _bytes((bias, weights))
    sums = 0 if bias is None else partial_sums(x.shape[0], bias.numel())
    backward = stored + 3 * x.nbytes // 2 + small + _bytes((weights,)) + sums
    return Cost(forward=3 * x.nbytes // 2 + small + stored, backward=backward, saved=stored + small, forward_visits=2)


def indices_to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> Cost:
    """Reads indices and weights and writes two rows over the experts; backward reads and writes one entry per slot."""
    dense = indices.shape[0] * num_experts
    read = _bytes((indices, probs_indices))
    local = int(((indices >= 0) & (indices < num_experts)).sum()) * probs_indices.element_size()
    return Cost(forward=read + dense * (1 + probs_indices.element_size()), backward=read + local, saved=indices.nbytes)


def mla_rope_kv(kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Cost:
    """Reads kv, the shared part of the keys and the tables; writes k and v. Backward moves their gradients."""
    heads, shared = kv.shape[:-1].numel(), _bytes((cos, sin, positions))
    written = kv.nbytes + heads * k_pos_emb.shape[-1] * kv.element_size()
    moved = kv.nbytes + k_pos_emb.nbytes + written + shared
    return Cost(forward=moved, backward=moved, saved=shared)


def multihot_to_indices(multihot: Tensor, probs: Tensor, topk: int) -> Cost:
    """Reads the map, and at most one weight per slot; backward writes a row over the experts."""
    indices, weights = 8 * multihot.shape[0] * topk, probs.element_size() * multihot.shape[0] * topk
    return Cost(
        forward=multihot.nbytes + indices + 2 * weights, backward=indices + weights + probs.nbytes, saved=indices
    )


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, num_statistics: int) -> Cost:
    """Reads x and writes y and the statistics; backward reads dy, x and the statistics, and writes dx and sums."""
    statistics, sums = 4 * num_statistics * x.shape[0], _partial_sums_of_norm(x, (weight, bias))
    return Cost(
        forward=2 * x.nbytes + _bytes((weight, bias)) + statistics,
        backward=3 * x.nbytes + _bytes((weight,)) + statistics + sums,
        saved=x.nbytes + _bytes((weight,)) + statistics,
    )


def pad_routing_map(routing_map: Tensor) -> Cost:
    """Reads the map to count, again to pad, and writes it; the second read of a small map hits the cache."""
    return Cost(forward=2 * routing_map.nbytes, backward=0, saved=0, forward_visits=2)


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float = 1.0,
) -> Cost:
    """Reads the scores inside the window and writes p; backward reads p and dp there, and writes dx.

    A GPU reads 32-byte sectors, so windows are counted in steps of 16 keys.
    """
    *batches, Sq, Sk = scores.shape
    left, right = window
    right = 0 if causal else right
    read = 0
    for own in range(Sk - Sq, Sk):
        first = 0 if left < 0 else max(0, own - left) // 16 * 16
        last = Sk if right < 0 else min(Sk, -(-max(0, own + right + 1) // 16) * 16)
        read += max(0, last - first)
    read = scores.element_size() * read * math.prod(batches)
    shares = 0 if sink is None else 4 * math.prod(batches) * Sq
    return Cost(
        forward=read + scores.nbytes + _bytes((mask, sink)) + shares,
        backward=2 * read + scores.nbytes + shares,
        saved=scores.nbytes + shares,
    )


def partial_sums(num_rows: int, width: int) -> int:
    """Bytes of the float32 partial sums of a gradient of ``width`` columns over ``num_rows`` rows."""
    return 4 * width * -(-num_rows // rows_per_sum(num_rows, 1))


def rope(
    q: Tensor,
    k: Tensor | None = None,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
) -> Cost:
    """Reads q, k and tables and writes q and k; with a norm, also writes a float32 per head, and backward reads x."""
    shared = _bytes((cos, sin, positions, q_norm_weight, k_norm_weight))
    normed = [x for x, w in ((q, q_norm_weight), (k, k_norm_weight)) if x is not None and w is not None]
    rstd = 4 * sum(x.shape[:-1].numel() for x in normed)
    rotated, sums = 2 * _bytes((q, k)), sum(partial_sums(x.shape[0] * x.shape[1], x.shape[-1]) for x in normed)
    return Cost(
        forward=rotated + shared + rstd,
        backward=rotated + _bytes(normed) + shared + rstd + sums,
        saved=_bytes(normed) + shared + rstd,
    )


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, num_experts: int, num_rows: Callable[[int], int]
) -> Cost:
    """Reads each token once, writes its rows, and zeros unused rows; backward does the reverse.

    The map of slots is read in both directions and saved; the map of rows is read in the forward, for its gaps.
    """
    row, slots, R = tokens.nbytes // max(1, len(tokens)), 4 * routing_map.numel(), num_rows(len(tokens))
    routed = int(((routing_map >= 0) & (routing_map < num_experts)).sum())
    weights = routed * probs.element_size()
    return Cost(
        forward=tokens.nbytes + R * (row + 4 + probs.element_size()) + slots + weights,
        backward=tokens.nbytes + routed * row + slots + weights + probs.nbytes,
        saved=slots,
    )


def quantize(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Cost:
    """Reads x, writes values and scales, also of the transpose; some kinds first read x once more, for an amax.

    64 x 64 tiles read the amax of the whole tensor; row and column amaxes are written and read by each tile.
    """
    layout, (R, H) = LAYOUTS[kind], x.shape
    rows, columns = -(-R // 64), -(-H // 64)
    written = sum(y.nbytes for y in outputs_of(x.unsqueeze(0), kind, dtype, transpose))
    along_both = kind == "row" and transpose
    twice = layout.of_all or along_both
    partial = 4 * (H * rows + R * columns + R + H) if along_both else 0
    visits = 1 + rows * columns if twice else 1
    return Cost(forward=x.nbytes + written + partial, backward=0, saved=0, forward_visits=visits)


def row_map(routing_map: Tensor, num_rows: int, num_experts: int) -> Cost:
    """Reads the routing to count, to sum and, for indices, to look up; writes 4 bytes per slot, row and expert."""
    tiles = -(-len(routing_map) // 128)
    counts = 2 * 4 * tiles * num_experts
    visits = 2 if routing_map.dtype == torch.bool else 3
    written = 4 * (routing_map.numel() + num_rows + num_experts)
    return Cost(forward=routing_map.nbytes + counts + written, backward=0, saved=0, forward_visits=visits)


def topk_router(logits: Tensor, expert_bias: Tensor | None = None, *, topk: int, whole: bool = False) -> Cost:
    """Reads logits, writes K weights and indices, adds to the counts; backward reads the chosen experts' logits.

    With ``whole``, for softmax over all experts, backward reads all logits.
    """
    T, e = len(logits), logits.element_size()
    chosen = T * topk * (8 + e)
    return Cost(
        forward=_bytes((logits, expert_bias)) + chosen,
        backward=(logits.nbytes if whole else T * topk * e) + chosen + logits.nbytes,
        saved=logits.nbytes + 8 * T * topk,
    )


def unpermute(permuted: Tensor, routing_map: Tensor, probs: Tensor, num_experts: int) -> Cost:
    """Reads each token's rows and writes the token; backward reads the rows again, for dprobs, and writes them all."""
    row, slots, R = permuted.nbytes // len(permuted), 4 * routing_map.numel(), len(permuted)
    read = int(((routing_map >= 0) & (routing_map < num_experts)).sum()) * row
    y = len(routing_map) * row
    return Cost(
        forward=read + y + slots + probs.nbytes,
        backward=y + read + permuted.nbytes + slots + 4 * R + 2 * probs.nbytes,
        saved=permuted.nbytes + probs.nbytes + slots + 4 * R,
    )


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, *, num_statistics: int = 3) -> Cost:
    """Reads logits, then a few numbers per row and the target's logit again; backward reads logits, writes gradients.

    Per row: the target (8 bytes); statistics written, read, and written again for backward; loss or dloss (4 bytes).
    """
    x, T = vocab_parallel_logits.nbytes, target.numel()
    return Cost(
        forward=x + T * (8 + 2 * 4 * num_statistics + 12 + 4),
        backward=2 * x + T * (8 + 12 + 4),
        saved=x + T * (8 + 12),
        forward_visits=2,
    )


def weighted_squared_relu(input: Tensor, weights: Tensor) -> Cost:
    """Reads x and w and writes y; backward reads dy, x and w, and writes dx and dw."""
    x, w = input.nbytes, weights.nbytes
    return Cost(forward=2 * x + w, backward=3 * x + 2 * w, saved=x + w)


def _partial_sums_of_norm(x: Tensor, parameters: Iterable[Tensor | None]) -> int:
    """Bytes of the partial sums of the gradients of ``parameters`` [H], for ``x`` [T, H] with one tile per row."""
    T, H = x.shape
    parts = -(-T // rows_per_program(T, max(1, 2048 // H), 1))
    return 4 * H * parts * sum(parameter is not None for parameter in parameters)


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(x.nbytes for x in tensors if x is not None)
