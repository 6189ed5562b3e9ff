"""Triton kernels of aux_loss_scores: a program holds whole rows of a few tokens, as in topk_router."""

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.routing.aux_loss_scores_formulas import OPERATOR
from megalith.fusions.routing.kernels.topk_router import TAKEN, key_of, score, slope, softmax_of_rows, take, tile
from megalith.fusions.routing.scores import EPSILON

__all__ = ["op"]

_EPSILON = tl.constexpr(EPSILON)


@triton.jit
def _scores_kernel(
    x_ptr, scores_ptr, map_ptr, x_stride, T, E,
    K: tl.constexpr, KIND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.arange(0, BLOCK_E)
    of_row = (col < E)[None, :]
    mask = (row < T)[:, None] & of_row
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if KIND == "softmax":
        scores = softmax_of_rows(x, of_row)
    else:
        q = tl.where(of_row, score(x, KIND), 0.0)
        scores = q / (tl.sum(q, axis=1) + _EPSILON)[:, None]
    key = key_of(x, of_row)
    for _ in range(K):
        _, key = take(key, col)
    at = row[:, None] * E + col[None, :]
    tl.store(scores_ptr + at, scores, mask=mask)
    tl.store(map_ptr + at, key == TAKEN, mask=mask)


@triton.jit
def _scores_back_kernel(
    dy_ptr, x_ptr, dx_ptr, dy_row, dy_column, x_stride, T, E,
    KIND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.arange(0, BLOCK_E)
    of_row = (col < E)[None, :]
    mask = (row < T)[:, None] & of_row
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row[:, None] * dy_row + col[None, :] * dy_column, mask=mask, other=0.0)
    if KIND == "softmax":
        p = softmax_of_rows(x, of_row)
        dx = p * (dy - tl.sum(dy * p, axis=1)[:, None])
    else:
        q = score(x, KIND)
        total = (tl.sum(tl.where(of_row, q, 0.0), axis=1) + _EPSILON)[:, None]
        dx = (dy - tl.sum(dy * q / total, axis=1)[:, None]) / total * slope(x, q, KIND)
    tl.store(dx_ptr + row[:, None] * E + col[None, :], dx, mask=mask)


def _scores(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    scores, routing_map = OPERATOR.outputs(logits, topk, score)
    T, E = logits.shape
    if T:
        logits, tiling = contiguous_columns(logits), tile(E)
        wrap_triton(_scores_kernel)[(cdiv(T, tiling["BLOCK_T"]),)](
            logits, scores, routing_map, logits.stride(0), T, E, K=topk, KIND=score, **tiling
        )
    return scores, routing_map


def _scores_back(dscores: Tensor, logits: Tensor, score: str) -> tuple[Tensor]:
    (dlogits,) = OPERATOR.gradients(dscores, logits, score)
    T, E = logits.shape
    if T:
        logits, tiling = contiguous_columns(logits), tile(E)
        wrap_triton(_scores_back_kernel)[(cdiv(T, tiling["BLOCK_T"]),)](
            dscores, logits, dlogits, *dscores.stride(), logits.stride(0), T, E, KIND=score, **tiling
        )
    return (dlogits,)


op = OPERATOR.register("aux_loss_scores", _scores, _scores_back)
