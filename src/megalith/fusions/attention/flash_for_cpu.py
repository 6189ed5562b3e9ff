"""Attention on a CPU: torch's flash kernels, applied to tiles that cover all visible pairs of query and key.

A tile is a rectangle of queries and keys of successive rows. Whole rows, or a document in the same place of each, are
one tile, causal or not, so that padded rows of one length take as few calls as rows without padding. With a window,
or with queries after a cache, there is one tile for every few queries, with a mask no larger than the tile; keys that
no query sees are in no tile, and cost nothing. For queries after a cache, documents are part of the mask: a separate
call for each row would cost more than it saves.

float16 is widened to float32: that is faster than torch's float16 kernels, which also accumulate the gradient of v in
16 bits. ``products_for_cpu`` computes the backward of short rows and documents, where torch's kernel is slower, and the
forward of bfloat16 on a CPU that has instructions for it but no AMX, where torch's kernel does not use them. The other
backwards of bfloat16 are computed in float32 if that is faster: for fewer than 192 queries, and without instructions
for bfloat16.

torch's kernels require one head size for q, k and v, and do not differentiate the log-sum-exp. Smaller heads are padded
with zero columns. Backward adds two more columns, ones in v and dlse in dout, so that dout v^T becomes dout v^T + dlse,
as the gradient requires.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.attention.formulas import GivenToBackward, Seen, operator, sink_gradient
from megalith.fusions.attention.products_for_cpu import (
    attention_by_products,
    gradients_by_products,
    queries_at_a_time,
)
from megalith.fusions.core.registration import register_without_gradient
from megalith.fusions.core.rows import contiguous_columns, wide

__all__ = ["gradients_of_part", "op"]

# queries per masked tile; about the fastest of 32 to 512, for windows of 128 and 512 tokens on two cores
_QUERIES = 256
_NONE_SEEN = float("-inf")
# lengths of rows for which ``products_for_cpu`` is faster than torch's kernel: in backward any rows, causal ones, and
# any in bfloat16 on a CPU with instructions for it; in forward any in bfloat16 with these, but not AMX
# (benchmarks/results/attention-rows-cpu-20261127-2354.md with AMX, -20261128.md without, both without groups)
_SHORT, _SHORT_CAUSAL, _SHORT_IN_BFLOAT16, _FORWARD = range(96, 192), range(256, 641), range(96, 705), range(64, 4097)
_MOST_SCORES = 1 << 20  # of one key head in memory at once
# of all key heads and rows; with fewer, the overhead of twenty small calls is more than products save
_FEWEST_QUERIES = 2048
_MIN_BFLOAT16_QUERIES = 192  # from this many on, torch's backward multiplies larger blocks of queries


class _Tile(NamedTuple):
    """Slices of batch, queries and keys; ``mask`` [Sq, Sk] or [B, 1, Sq, Sk] of the tile contains 0 or -inf."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.keys]

    def of_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of ``q`` [S, B, A, D], ``k`` and ``v``."""
        return q[self.queries, self.rows], k[self.keys, self.rows], v[self.keys, self.rows]


def _tiles(q: Tensor, k: Tensor, bounds: Tensor | None, left: int, right: int) -> list[_Tile]:
    """The tiles of ``q`` [B, A, Sq, D] and ``k`` [B, G, Sk, D]; each query is in at most one."""
    if bounds is None or q.shape[2] != k.shape[2]:
        found = _tiles_of(slice(0, q.shape[0]), 0, (q.shape[2], k.shape[2]), left, right, q.dtype)
        tiles = list(found) if q.numel() and k.numel() else []
        return tiles if bounds is None else [_within_documents(tile, bounds, right, q.dtype) for tile in tiles]
    return [
        tile
        for rows, start, end in _documents(bounds)
        for tile in _tiles_of(rows, start, (end - start, end - start), left, right, q.dtype)
    ]


def _documents(bounds: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Each document's rows, start and end; one in the same place of successive rows, like their tokens, comes once."""
    begins = bounds[..., 0] == torch.arange(bounds.shape[1])
    rows_of: dict[tuple[int, int], list[int]] = {}
    for (row, _), (start, end) in zip(begins.nonzero().tolist(), bounds[begins].tolist(), strict=True):
        rows_of.setdefault((start, end), []).append(row)
    for (start, end), rows in rows_of.items():
        for _, run in groupby(enumerate(rows), key=lambda each: each[1] - each[0]):
            successive = [row for _, row in run]
            yield slice(successive[0], successive[-1] + 1), start, end


def _tiles_of(
    rows: slice, start: int, sizes: tuple[int, int], left: int, right: int, dtype: torch.dtype
) -> Iterator[_Tile]:
    """The tiles for ``sizes`` queries and keys starting at ``start``, with the last query aligned with the last key."""
    Sq, Sk = sizes
    beside = Sk - Sq  # query i is aligned with key i + beside
    causal = _causal_if_unmasked(Sq, Sk, left, right)
    if causal is not None:
        yield _Tile(rows, slice(start, start + Sq), slice(start, start + Sk), causal)
        return
    for first in range(max(0, -beside - right), Sq, _QUERIES):  # queries before those see no key
        last = min(first + _QUERIES, Sq) - 1
        low, high = max(0, first + beside - left), min(Sk, last + beside + right + 1)
        mask = None
        if low < last + beside - left or first + beside + right + 1 < high:
            distance = torch.arange(low, high) - torch.arange(first + beside, last + beside + 1).unsqueeze(1)
            seen = (distance >= -left) & (distance <= right)
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, _NONE_SEEN)
        yield _Tile(rows, slice(start + first, start + last + 1), slice(start + low, start + high), mask=mask)


def _within_documents(tile: _Tile, bounds: Tensor, right: int, dtype: torch.dtype) -> _Tile:
    """``tile``, covering all rows, with keys outside the query's document masked."""
    # the common case is one new token per row, where a dozen small calls take as long as attention itself
    bounds = bounds[:, None, tile.queries]  # [B, 1, Sq, 2]
    keys = torch.arange(tile.keys.start, tile.keys.stop, dtype=bounds.dtype)
    hidden = keys < bounds[..., :1]  # [B, 1, Sq, Sk]
    if right > 0:  # otherwise the tile or its causal mask already hides later keys
        hidden |= keys >= bounds[..., 1:]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, _NONE_SEEN)
    return tile._replace(mask=mask if tile.mask is None else mask + tile.mask)


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *seen: Unpack[Seen]) -> tuple[Tensor, Tensor]:
    bounds, scale, softcap, left, right = seen
    assert softcap is None, "torch's kernels do not support softcap; Fusion.path should have refused this call"
    (Sq, B, A, D), Dv, dtype = q.shape, v.shape[-1], q.dtype
    given = q, k, v
    q, k, v = (_heads_first(x, max(D, Dv)) for x in given)

    def attend(tile: _Tile, own_q: Tensor, own_k: Tensor, own_v: Tensor) -> tuple[Tensor, Tensor]:
        if _is_faster_by_products(tile, q, k):
            tokens = tile.of_tokens(*given)
            return attention_by_products(*tokens, scale, causal=tile.causal, rounded=True)
        out, lse = _flash(own_q, own_k, own_v, tile, scale)
        return out[..., :Dv], lse

    tiles = _tiles(q, k, bounds, left, right)
    if _is_all(tiles, q, k):
        out, lse = attend(tiles[0], q, k, v)  # not sliced by a number of keys, which grows while tokens are generated
    else:
        out = q.new_zeros(Sq, B, A, Dv).permute(1, 2, 0, 3)
        lse = q.new_full((B, Sq, A), _NONE_SEEN, dtype=wide(q.dtype)).transpose(1, 2)
        for tile in tiles:
            parts = tile.of_queries(q), tile.of_keys(k), tile.of_keys(v)
            tile.of_queries(out)[:], tile.of_queries(lse)[:] = attend(tile, *parts)
    if sink is not None:
        of_keys, lse = lse, torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(-1))
        out = out * torch.exp(of_keys - lse).unsqueeze(-1)
    return out.permute(2, 0, 1, 3).to(dtype).contiguous(), _heads_last(lse)


def _backward(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(GivenToBackward(*inputs), all_keys=True)


def _backward_of_part(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(GivenToBackward(*inputs), all_keys=False)


def _gradients(given: GivenToBackward, *, all_keys: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink; ``all_keys`` says whether lse covers no other keys than the given ones."""
    given_dout, dlse, q, k, v, sink, out, lse, bounds, scale, _, left, right = given
    D, Dv = q.shape[-1], v.shape[-1]
    whole_dout = torch.zeros_like(out) if given_dout is None else given_dout
    dsink = q.new_empty(0) if sink is None else sink_gradient(whole_dout, dlse, out, lse, sink)
    width = max(D, Dv) + (0 if dlse is None else 2)
    q, k, v, out, dout = (_heads_first(x, width) for x in (q, k, v, out, whole_dout))
    if dlse is not None:
        v[..., -2:] = 1.0
        dout[..., -2] = dlse
        dout[..., -1] = dlse - dout[..., -2]  # the rounding error of the column before
    lse = lse.masked_fill(lse == _NONE_SEEN, 0.0)  # for queries that see no key: exp(-inf - 0) is 0, as required

    def gradients(tile: _Tile) -> tuple[Tensor, ...]:
        if _is_short(tile, q, k):
            return _products(whole_dout, given, tile, all_keys=all_keys)
        parts = _flash_back(dout, q, k, v, out, lse, tile, scale)
        return tuple(part[..., :size] for part, size in zip(parts, (D, D, Dv), strict=True))

    tiles = _tiles(q, k, bounds, left, right)
    if _is_all(tiles, q, k):
        dq, dk, dv = gradients(tiles[0])
    else:
        # gradients of keys in several tiles are accumulated in float32
        shared = any(a.rows == b.rows and a.keys.start <= b.keys.start < a.keys.stop for a, b in pairwise(tiles))
        of_keys = wide(q.dtype) if shared else q.dtype
        dq = _zeros_heads_first(q, D, q.dtype)
        dk, dv = _zeros_heads_first(k, D, of_keys), _zeros_heads_first(v, Dv, of_keys)
        for tile in tiles:
            dq_part, dk_part, dv_part = gradients(tile)
            tile.of_queries(dq)[:] = dq_part
            tile.of_keys(dk).add_(dk_part)
            tile.of_keys(dv).add_(dv_part)
    dq, dk, dv = (_heads_last(x.to(given.q.dtype)).permute(2, 0, 1, 3) for x in (dq, dk, dv))
    return dq, dk, dv, dsink


def _is_faster_by_products(tile: _Tile, q: Tensor, k: Tensor) -> bool:
    """Whether attention of ``tile`` of ``q`` [B, A, Sq, D] and ``k`` [B, G, Sk, D] is faster by products."""
    is_slow = q.dtype == torch.bfloat16 and _multiplies_bfloat16() and not _has_amx()
    return is_slow and _is_for_products(tile, q, k, [_FORWARD])


def _is_short(tile: _Tile, q: Tensor, k: Tensor) -> bool:
    """Whether the gradients of ``tile`` of ``q`` [B, A, Sq, D] and ``k`` [B, G, Sk, D] are faster by products."""
    if q.dtype == torch.bfloat16 and _multiplies_bfloat16():
        lengths = [_SHORT_IN_BFLOAT16]
    else:
        lengths = [_SHORT, _SHORT_CAUSAL] if tile.causal else [_SHORT]
    return q.dtype != torch.float64 and _is_for_products(tile, q, k, lengths)


def _is_for_products(tile: _Tile, q: Tensor, k: Tensor, lengths: list[range]) -> bool:
    """Whether ``tile`` has no mask, a length within ``lengths``, and neither too many scores nor too few queries."""
    B, Sq, Sk = (each.stop - each.start for each in tile[:3])
    G = k.shape[1]
    num_scores = q.shape[1] // G * queries_at_a_time(Sq, causal=tile.causal) * Sk
    has_length = any(Sq in each and Sk in each for each in lengths)
    return tile.mask is None and has_length and num_scores <= _MOST_SCORES and B * G * Sq >= _FEWEST_QUERIES


def _products(dout: Tensor, given: GivenToBackward, tile: _Tile, *, all_keys: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of ``tile`` by ``gradients_by_products``; ``dout`` [Sq, B, A, Dv]."""
    rows, queries = tile.rows, tile.queries
    q, k, v = tile.of_tokens(given.q, given.k, given.v)
    dlse = None if given.dlse is None else given.dlse[rows, :, queries]
    out_and_lse = None
    if given.sink is not None or not all_keys:
        out_and_lse = given.out[queries, rows], given.lse[rows, :, queries]
    rounded = q.dtype == torch.bfloat16 and _multiplies_bfloat16()
    return gradients_by_products(
        dout[queries, rows], dlse, q, k, v, out_and_lse, given.scale, causal=tile.causal, rounded=rounded
    )


def _causal_if_unmasked(Sq: int, Sk: int, left: int, right: int) -> bool | None:
    """Whether attention is causal, if all pairs, or all causal pairs of equally long rows, are visible; else None."""
    if left >= Sk - 1 and (right >= Sq - 1 or right == Sk - Sq == 0):
        return right < Sq - 1
    return None


def _is_all(tiles: list[_Tile], q: Tensor, k: Tensor) -> bool:
    """Whether there is a single tile that covers all queries and keys."""
    # compares slices, not tensors, whose overhead would be noticeable when decoding one token
    whole = slice(0, q.shape[0]), slice(0, q.shape[2]), slice(0, k.shape[2])
    return len(tiles) == 1 and tiles[0][:3] == whole


def _flash(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of the queries and keys of ``tile``."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, tile.causal, attn_mask=tile.mask, scale=scale
    )
    return out, lse


def _flash_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: _Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the queries and keys of ``tile``, in float32 or the dtype of the inputs."""
    lse, mask = tile.of_queries(lse), tile.mask
    inputs = [*map(tile.of_queries, (dout, q, out)), *map(tile.of_keys, (k, v))]
    if q.dtype == torch.bfloat16 and (inputs[0].shape[2] < _MIN_BFLOAT16_QUERIES or not _multiplies_bfloat16()):
        inputs, mask = [x.float() for x in inputs], None if mask is None else mask.float()
    dout, q, out, k, v = inputs
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, tile.causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16: AMX, or those of AMD's CPUs since Zen 4."""
    return _has_amx() or bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def _has_amx() -> bool:
    """Whether the CPU multiplies tiles of bfloat16, like Intel's Xeons since Sapphire Rapids."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def _heads_first(x: Tensor, width: int) -> Tensor:
    """``x`` [S, B, heads, D] as [B, heads, S, width], padded with zeros, columns contiguous; a view if possible.

    float16 becomes float32, as torch's kernels are not given float16.
    """
    x = x.float() if x.dtype == torch.float16 else x
    x = contiguous_columns(x) if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return x.permute(1, 2, 0, 3)


def _heads_last(x: Tensor) -> Tensor:
    """``x`` [B, heads, S, ...] in the memory layout of torch's kernels: [B, S, heads, ...]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _zeros_heads_first(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[B, heads, S, size], for ``x`` [B, heads, S, ...]."""
    B, heads, S, _ = x.shape
    return x.new_zeros(B, S, heads, size, dtype=dtype).transpose(1, 2)


_OPERATOR = operator(batch_first=True)
op = _OPERATOR.register("attention_for_cpu", _forward, _backward, opaque=True)
gradients_of_part = register_without_gradient(
    "attention_of_part_for_cpu_back", _backward_of_part, _OPERATOR.gradients, opaque=True
)
