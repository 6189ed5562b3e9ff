"""Triton kernels of fused_quantize: tiles of low-precision numbers with their scales, and the same tiles transposed.

N matrices of R rows and H columns. Numbers are rounded by ``float8``, and quotients to the nearest float32, so that a
GPU, the interpreter and torch give the same bits. Rows may be strided.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.kernels.float8 import INFINITY, MAGNITUDE, NAN, casts_natively, decode_e4m3, encode
from megalith.fusions.core.registration import register_without_gradient, wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.quantization.quantized import (
    FORMATS,
    LAYOUTS,
    SMALLEST_SCALE,
    SMALLEST_TENSOR_SCALE,
    Outputs,
    outputs_of,
)

__all__ = ["op"]

_TILE = 4096  # elements per tile, except for tiles of 128 x 128; untuned
_WIDEST_ROW = 16384  # columns of a row that one program can hold; wider rows are read twice
_LARGEST = {torch.float16: 0x477FE000, torch.bfloat16: 0x7F7F0000, torch.float32: 0x7F7FFFFF}  # finite, as float32

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_SMALLEST_TENSOR_SCALE = tl.constexpr(SMALLEST_TENSOR_SCALE)


@triton.jit
def _magnitude(x, LARGEST: tl.constexpr):
    """The bits of abs(x), whose order is that of numbers; ``LARGEST`` for an infinity, 0 for NaN."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.where(bits > INFINITY, 0, tl.minimum(bits, LARGEST))


@triton.jit
def _scale(magnitude, FORMAT: tl.constexpr):
    MAX: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    return tl.maximum(tl.div_rn(magnitude.to(tl.float32, bitcast=True), MAX), _SMALLEST_SCALE)


@triton.jit
def _tensor_scale(magnitude):
    return tl.maximum(tl.div_rn(magnitude.to(tl.float32, bitcast=True), 448.0 * 6.0), _SMALLEST_TENSOR_SCALE)


@triton.jit
def _group_scales(magnitude, amax_ptr, KIND: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The scales of groups as they are stored, and what their elements are multiplied by."""
    if KIND == "mxfp8":
        LARGEST_EXPONENT: tl.constexpr = 8 if FORMAT == "e4m3" else 15
        scale = tl.maximum((magnitude >> 23) - LARGEST_EXPONENT, 0)
        factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    elif KIND == "nvfp4":
        unit = tl.div_rn(1.0, _tensor_scale(tl.load(amax_ptr)))
        code = encode(tl.div_rn(magnitude.to(tl.float32, bitcast=True), 6.0) * unit, "e4m3", NATIVE)
        scale = tl.maximum(code.to(tl.int32), 1)
        factor = tl.div_rn(unit, decode_e4m3(scale, NATIVE))
    else:
        scale = _scale(magnitude, FORMAT)
        factor = tl.div_rn(1.0, scale)
    return scale, factor


@triton.jit
def _quantize(
    x, tile, R, amax_ptr,
    KIND: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of rows, the ``tile``-th of R, and its scales: one, one a row, or one a group of ``COLUMNS``."""
    BLOCK_R: tl.constexpr = x.shape[0]
    BLOCK_H: tl.constexpr = x.shape[1]
    if COLUMNS is not None:
        parts = tl.reshape(x, [BLOCK_R, BLOCK_H // COLUMNS, COLUMNS])
        scale, factor = _group_scales(tl.max(_magnitude(parts, LARGEST), axis=2), amax_ptr, KIND, FORMAT, NATIVE)
        codes = tl.reshape(encode(parts * factor[:, :, None], FORMAT, NATIVE), [BLOCK_R, BLOCK_H])
        if KIND == "nvfp4":
            worst = tl.max(parts.to(tl.int32, bitcast=True) & MAGNITUDE, axis=2)
            scale = tl.where(worst > INFINITY, NAN, scale)
    elif KIND == "row":
        row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        scale = _scale(tl.load(amax_ptr + row, mask=row < R, other=0), FORMAT)
        codes = encode(x * tl.div_rn(1.0, scale)[:, None], FORMAT, NATIVE)
    else:
        magnitude = tl.load(amax_ptr) if KIND == "tensor" else tl.max(tl.max(_magnitude(x, LARGEST), axis=1), axis=0)
        scale = _scale(magnitude, FORMAT)
        codes = encode(x * tl.div_rn(1.0, scale), FORMAT, NATIVE)
    return codes, scale


@triton.jit
def _inside(tile_row, tile_col, stride, R, H, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, WIDE: tl.constexpr):
    """Where the elements of a tile lie, from its first, and which of them are in [R, H]; 32 bits unless ``WIDE``."""
    row, col = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    rows, columns = tl.minimum(R - tile_row * BLOCK_R, BLOCK_R), tl.minimum(H - tile_col * BLOCK_H, BLOCK_H)
    mask = (row < rows.to(tl.int32))[:, None] & (col < columns.to(tl.int32))[None, :]
    if WIDE:
        row = row.to(tl.int64)
    return row[:, None] * stride + col[None, :], mask


@triton.jit
def _load_tile(
    x_ptr, tile_row, tile_col, stride, R, H, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, WIDE: tl.constexpr
):
    offsets, mask = _inside(tile_row, tile_col, stride, R, H, BLOCK_R, BLOCK_H, WIDE)
    x_ptr += tile_row * BLOCK_R * stride + tile_col * BLOCK_H
    return tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_codes(codes, tile_row, tile_col, R, H, values_ptr, KIND: tl.constexpr, WIDE: tl.constexpr):
    """Writes a tile of the bytes [R, H], or [R, H/2] of nvfp4."""
    BLOCK_R: tl.constexpr = codes.shape[0]
    BLOCK_H: tl.constexpr = codes.shape[1] // 2 if KIND == "nvfp4" else codes.shape[1]
    if KIND == "nvfp4":
        low, high = tl.split(tl.reshape(codes, [BLOCK_R, BLOCK_H, 2]))
        codes = low | (high << 4)
        H = H // 2
    offsets, mask = _inside(tile_row, tile_col, H, R, H, BLOCK_R, BLOCK_H, WIDE)
    values_ptr += tile_row * BLOCK_R * H + tile_col * BLOCK_H
    tl.store(values_ptr + offsets, codes.to(tl.uint8), mask=mask)


@triton.jit
def _store_scale(scale, tile_row, tile_col, R, num_scales, scale_ptr, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes the scales of a tile; a row, or a whole tensor, has ``num_scales`` of them."""
    if COLUMNS is not None:
        row = tile_row * scale.shape[0] + tl.arange(0, scale.shape[0])
        col = tile_col * scale.shape[1] + tl.arange(0, scale.shape[1])
        mask = (row < R)[:, None] & (col < num_scales)[None, :]
        # those of block128 column by column
        at = col[None, :] * R + row[:, None] if KIND == "block128" else row[:, None] * num_scales + col[None, :]
        tl.store(scale_ptr + at, scale, mask=mask)
    elif KIND == "row":
        row = tile_row * scale.shape[0] + tl.arange(0, scale.shape[0])
        tl.store(scale_ptr + row, scale, mask=(row < R) & (tile_col == 0))
    elif KIND == "tensor":
        tl.store(scale_ptr, scale, mask=(tile_row == 0) & (tile_col == 0))
    else:
        tl.store(scale_ptr + tile_row * num_scales + tile_col, scale)


@triton.jit
def _amax_kernel(
    x_ptr, all_ptr, rows_ptr, columns_ptr, stride, R, H,
    LARGEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of a tile, as bits: the one, those of its rows, those of its columns."""
    tile_row, tile_col = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    magnitude = _magnitude(_load_tile(x_ptr, tile_row, tile_col, stride, R, H, BLOCK_R, BLOCK_H, WIDE), LARGEST)
    of_rows = tl.max(magnitude, axis=1)
    if all_ptr is not None:
        tl.store(all_ptr + tile_row * tl.num_programs(1) + tile_col, tl.max(of_rows, axis=0))
    if rows_ptr is not None:
        row = tile_row * BLOCK_R + tl.arange(0, BLOCK_R)
        tl.store(rows_ptr + tile_col * R + row, of_rows, mask=row < R)
    if columns_ptr is not None:
        col = tile_col * BLOCK_H + tl.arange(0, BLOCK_H)
        tl.store(columns_ptr + tile_row * H + col, tl.max(magnitude, axis=0), mask=col < H)


@triton.jit
def _quantize_kernel(
    x_ptr, amax_ptr, amax_t_ptr, values_ptr, scale_ptr, tensor_scale_ptr, values_t_ptr, scale_t_ptr,
    matrix_stride, stride, R, H, num_scales, num_scales_t,
    KIND: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix, and of its transpose, if there are pointers for that.

    Where codes are needed twice, as they are and transposed or decoded, they are not made by the instruction, which
    gives them in pairs: ptxas 12.8, which Triton 3.6 has, merges two pairs into one register there, and then reads
    single codes from a register that was never written. On an H100 the transposes of these kinds were wrong, and on an
    H200 the scales of nvfp4 in narrow tiles.
    """
    TWICE: tl.constexpr = KIND == "nvfp4" or (values_t_ptr is not None and scale_t_ptr is None)
    NATIVELY: tl.constexpr = NATIVE and not TWICE
    tile_row, tile_col = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)
    x = _load_tile(x_ptr + matrix * matrix_stride, tile_row, tile_col, stride, R, H, BLOCK_R, BLOCK_H, WIDE)
    codes, scale = _quantize(x, tile_row, R, amax_ptr, KIND, FORMAT, COLUMNS, LARGEST, NATIVELY)
    _store_codes(codes, tile_row, tile_col, R, H, values_ptr + matrix * R * H, KIND, WIDE)
    scale_ptr += matrix * tl.num_programs(0) * num_scales  # only block128x128 has more matrices than one
    _store_scale(scale, tile_row, tile_col, R, num_scales, scale_ptr, KIND, COLUMNS)
    if tensor_scale_ptr is not None:
        tensor_scale = _tensor_scale(tl.load(amax_ptr))
        tl.store(tensor_scale_ptr, tensor_scale, mask=(tile_row == 0) & (tile_col == 0))
    if values_t_ptr is not None:
        if scale_t_ptr is None:
            codes = tl.trans(codes)
        else:
            codes, scale = _quantize(tl.trans(x), tile_col, H, amax_t_ptr, KIND, FORMAT, COLUMNS, LARGEST, NATIVELY)
            _store_scale(scale, tile_col, tile_row, H, num_scales_t, scale_t_ptr, KIND, COLUMNS)
        _store_codes(codes, tile_col, tile_row, H, R, values_t_ptr + matrix * R * H, KIND, WIDE)


def _forward(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    outputs = values, scale, tensor_scale, values_t, scale_t = outputs_of(x, kind, dtype, transpose)
    if x.numel() == 0:
        tensor_scale.fill_(SMALLEST_TENSOR_SCALE)
        for scales in (scale, scale_t):
            scales.fill_(SMALLEST_SCALE if scales.dtype == torch.float32 else 0)
        return outputs
    x, layout = contiguous_columns(x), LAYOUTS[kind]
    N, R, H = x.shape
    twice = kind == "row" and (transpose or H > _WIDEST_ROW)
    columns = None if twice or layout.tiled else next_power_of_2(H) if kind == "row" else layout.columns
    block_r, block_h = _tile_of(H, columns, kind, transpose)
    amax, amax_t = _amax(x[0], layout.of_all, transpose, block_r, block_h) if layout.of_all or twice else (None, None)
    wrap_triton(_quantize_kernel)[(cdiv(R, block_r), cdiv(H, block_h), N)](
        x, amax, amax_t, values, scale, tensor_scale if kind == "nvfp4" else None,
        values_t if transpose else None, scale_t if transpose and not layout.symmetric else None,
        x.stride(0), x.stride(1), R, H, cdiv(H, layout.columns or H), cdiv(R, layout.columns or R),
        KIND=kind, FORMAT=FORMATS[dtype].name, COLUMNS=columns,
        LARGEST=_LARGEST[x.dtype], BLOCK_R=block_r, BLOCK_H=block_h, WIDE=_is_wide(x), NATIVE=casts_natively(x),
        num_warps=_num_warps(block_r * block_h),
    )  # fmt: skip
    return outputs


def _amax(x: Tensor, of_all: bool, transpose: bool, block_r: int, block_h: int) -> tuple[Tensor | None, Tensor | None]:
    """Largest magnitudes, as float32 bits: of all of ``x`` [R, H], returned twice; or of its rows and its columns."""
    R, H = x.shape
    grid = cdiv(R, block_r), cdiv(H, block_h)
    whole = x.new_empty(grid, dtype=torch.int32) if of_all else None
    rows = None if of_all else x.new_empty(grid[1], R, dtype=torch.int32)
    columns = x.new_empty(grid[0], H, dtype=torch.int32) if transpose and not of_all else None
    wrap_triton(_amax_kernel)[grid](
        x, whole, rows, columns, x.stride(0), R, H,
        LARGEST=_LARGEST[x.dtype], BLOCK_R=block_r, BLOCK_H=block_h, WIDE=_is_wide(x),
        num_warps=_num_warps(block_r * block_h),
    )  # fmt: skip
    if whole is not None:
        amax = whole.amax()
        return amax, amax
    return (None if rows is None else rows.amax(dim=0)), (None if columns is None else columns.amax(dim=0))


def _tile_of(H: int, columns: int | None, kind: str, transpose: bool) -> tuple[int, int]:
    """Rows and columns of a tile, in whole groups of ``columns``; square if groups span both dimensions."""
    if kind in ("block128", "block128x128") and (transpose or kind == "block128x128"):
        return 128, 128
    if transpose:
        return 64, 64
    block_h = max(columns or 1, min(next_power_of_2(H), 1024))
    return max(1, _TILE // block_h), block_h


def _is_wide(x: Tensor) -> bool:
    """Whether 2^31 elements lie between the first and the last row of a tile of ``x``, or of its transpose."""
    farthest: int = max(x.stride(-2), *x.shape)
    return farthest * _TILE >= 2**31


def _num_warps(tile: int) -> int:
    return min(16, max(4, int(tile // 512)))  # an int also where torch.compile traces symbolic sizes


op = register_without_gradient("quantize", _forward, outputs_of)
