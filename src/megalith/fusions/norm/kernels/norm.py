"""Triton kernels of LayerNorm and RMSNorm, alone or of h = residual + dropout(x + bias); operators in add_norm.py.

T rows of H columns. Row t of x and of dy starts at (t // N) * outer + (t % N) * inner, so that heads inside a packed
projection need no copy; columns are contiguous. A program holds whole rows, several if they are short; wider
rows are read in tiles. Backward starts from h: x itself, or the sum that forward stored.
"""

import triton
import triton.language as tl

from megalith.fusions.core.kernels.philox import dropout_factor

__all__ = ["backward_kernel", "coefficients_kernel", "forward_kernel", "wide_forward_kernel"]


@triton.jit
def _at(first, N, outer, inner, ROWS: tl.constexpr):
    """Where ``ROWS`` rows begin, [ROWS, 1]; one division in 64 bits a program, where a row each would be dear."""
    along = (first % N).to(tl.int32) + tl.arange(0, ROWS)[:, None]
    return (first // N + along // N) * outer + (along % N) * inner


@triton.jit
def _gain(w_ptr, col, inside, ZERO_CENTERED: tl.constexpr):
    gain = tl.load(w_ptr + col, mask=inside, other=0.0).to(tl.float32)
    return 1.0 + gain if ZERO_CENTERED else gain


@triton.jit
def _factor(key_ptr, token_ptr, row, start, site, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """What dropout multiplies ``BLOCK`` columns of ``row`` with, from column ``start`` on."""
    token = row if token_ptr is None else tl.load(token_ptr + row)
    return dropout_factor(tl.load(key_ptr), token, start // 4, site, THRESHOLD, SCALE, BLOCK)[None, :]


@triton.jit
def _load_h(
    x_ptr, residual_ptr, input_bias_ptr, h_ptr, key_ptr, token_ptr, residual_at, row, first, start, mask, site, H,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h in float32, as it is stored: the norm is that of the residual stream, whatever its dtype.

    ``x_ptr`` is where the rows of x begin.
    """
    col = start + tl.arange(0, BLOCK)[None, :]
    h = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if input_bias_ptr is not None:
        h += tl.load(input_bias_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    if key_ptr is not None:
        h *= _factor(key_ptr, token_ptr, first, start, site, THRESHOLD, SCALE, BLOCK)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + residual_at + col, mask=mask, other=0.0).to(tl.float32)
        stored = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * H + col, stored, mask=mask)
        h = stored.to(tl.float32)
    return h


@triton.jit
def _store_y(y_ptr, w_ptr, b_ptr, x_hat, row, col, mask, H, ZERO_CENTERED: tl.constexpr):
    if w_ptr is not None:
        x_hat *= _gain(w_ptr, col, col < H, ZERO_CENTERED)
    if b_ptr is not None:
        x_hat += tl.load(b_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * H + col, x_hat, mask=mask)


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, input_bias_ptr, key_ptr, token_ptr, w_ptr, b_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr,
    x_outer, x_inner, residual_stride, site, T, N, H,
    EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``ROWS`` whole rows; one, where there is dropout."""
    first = tl.program_id(0).to(tl.int64) * ROWS  # row * stride passes 2^31 in a large batch
    row = first + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < T) & (col < H)
    h = _load_h(
        x_ptr + _at(first, N, x_outer, x_inner, ROWS), residual_ptr, input_bias_ptr, h_ptr, key_ptr, token_ptr,
        row * residual_stride, row, first, 0, mask, site, H, THRESHOLD, SCALE, BLOCK,
    )  # fmt: skip
    if mean_ptr is not None:
        mean = tl.sum(h, axis=1, keep_dims=True) / H
        tl.store(mean_ptr + row, mean, mask=row < T)
        h = tl.where(mask, h - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / H + EPS)
    tl.store(rstd_ptr + row, rstd, mask=row < T)
    _store_y(y_ptr, w_ptr, b_ptr, h * rstd, row, col, mask, H, ZERO_CENTERED)


@triton.jit
def wide_forward_kernel(
    x_ptr, residual_ptr, input_bias_ptr, key_ptr, token_ptr, w_ptr, b_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr,
    x_outer, x_inner, residual_stride, site, N, H,
    EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in tiles, whose statistics are merged as by Chan et al. 1983; the second reading finds it in a cache."""
    first = tl.program_id(0).to(tl.int64)
    row = first + tl.zeros([1, 1], dtype=tl.int64)
    x_at = _at(first, N, x_outer, x_inner, 1)
    mean = tl.zeros([1, 1], dtype=tl.float32)
    squares = tl.zeros([1, 1], dtype=tl.float32)  # sum of (h - mean)^2
    for start in range(0, H, BLOCK):
        mask = start + tl.arange(0, BLOCK)[None, :] < H
        h = _load_h(
            x_ptr + x_at, residual_ptr, input_bias_ptr, h_ptr, key_ptr, token_ptr, row * residual_stride, row, first,
            start, mask, site, H, THRESHOLD, SCALE, BLOCK,
        )  # fmt: skip
        if mean_ptr is not None:
            seen = start + 0.0
            width = tl.minimum(H - start, BLOCK) + 0.0
            tile_mean = tl.sum(h, axis=1, keep_dims=True) / width
            h = tl.where(mask, h - tile_mean, 0.0)
            step = tile_mean - mean
            mean += step * (width / (seen + width))
            squares += step * step * (seen * width / (seen + width))
        squares += tl.sum(h * h, axis=1, keep_dims=True)
    rstd = tl.rsqrt(squares / H + EPS)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    if residual_ptr is not None:
        x_ptr = h_ptr
        x_at = row * H
        tl.debug_barrier()  # the threads that read a column of h again need not be those that stored it
    for start in range(0, H, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        h = tl.load(x_ptr + x_at + col, mask=col < H, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            h -= mean
        _store_y(y_ptr, w_ptr, b_ptr, h * rstd, row, col, col < H, H, ZERO_CENTERED)


@triton.jit
def _load_for_backward(
    dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, dy_at, h_at, row, col, T, H, ZERO_CENTERED: tl.constexpr
):  # fmt: skip
    """dy, dy times the gain, and the normalised row, all 0 outside of it; and 1 / its deviation."""
    mask = (row < T) & (col < H)
    dy = tl.load(dy_ptr + dy_at + col, mask=mask, other=0.0).to(tl.float32)
    x_hat = tl.load(h_ptr + h_at + col, mask=mask, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        x_hat = tl.where(mask, x_hat - tl.load(mean_ptr + row, mask=row < T, other=0.0), 0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)
    by_gain = dy
    if w_ptr is not None:
        by_gain = dy * _gain(w_ptr, col, col < H, ZERO_CENTERED)
    return dy, by_gain, x_hat * rstd, rstd


@triton.jit
def _mean_over_row(given_ptr, x, row, T, H):
    if given_ptr is None:
        mean = tl.sum(x, axis=1, keep_dims=True) / H
    else:
        mean = tl.load(given_ptr + row, mask=row < T, other=0.0)
    return mean


@triton.jit
def coefficients_kernel(
    dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, along_ptr, across_ptr, dy_outer, dy_inner, h_outer, h_inner, N, H,
    ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What backward takes from a wide row: the means over it of x^ g dy and, for LayerNorm, of g dy."""
    first = tl.program_id(0).to(tl.int64)
    row = first + tl.zeros([1, 1], dtype=tl.int64)
    dy_at, h_at = _at(first, N, dy_outer, dy_inner, 1), _at(first, N, h_outer, h_inner, 1)
    along = tl.zeros([1, BLOCK], dtype=tl.float32)
    across = tl.zeros([1, BLOCK], dtype=tl.float32)
    for start in range(0, H, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        _, by_gain, x_hat, _ = _load_for_backward(
            dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, dy_at, h_at, row, col, row + 1, H, ZERO_CENTERED
        )
        along += by_gain * x_hat
        across += by_gain
    tl.store(along_ptr + row, tl.sum(along, axis=1, keep_dims=True) / H)
    if mean_ptr is not None:
        tl.store(across_ptr + row, tl.sum(across, axis=1, keep_dims=True) / H)


@triton.jit
def backward_kernel(
    dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, dh_ptr, key_ptr, token_ptr, along_ptr, across_ptr,
    dx_ptr, dresidual_ptr, dw_ptr, db_ptr, dinput_bias_ptr,
    dy_outer, dy_inner, h_outer, h_inner, dh_stride, site, T, N, H, num_rows,
    ZERO_CENTERED: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A block of columns of ``num_rows`` rows, ``ROWS`` at a time: their dx, and one part of dw, db and the bias's.

    The block is the whole row, unless ``along`` and ``across`` hold the means over it.
    """
    group, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    col = start + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    db = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    dinput_bias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for begin in tl.range(group * num_rows, tl.minimum(group * num_rows + num_rows, T), ROWS, num_stages=STAGES):
        first = tl.cast(begin, tl.int64)  # the interpreter counts in Python's integers, and takes them for 32 bits
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < T) & (col < H)
        dy, dh, x_hat, rstd = _load_for_backward(
            dy_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, _at(first, N, dy_outer, dy_inner, ROWS),
            _at(first, N, h_outer, h_inner, ROWS), row, col, T, H, ZERO_CENTERED,
        )  # fmt: skip
        if dw_ptr is not None:
            dw += dy * x_hat
        if db_ptr is not None:
            db += dy
        along = _mean_over_row(along_ptr, dh * x_hat, row, T, H)
        if mean_ptr is not None:
            dh -= _mean_over_row(across_ptr, dh, row, T, H)
        dh = (dh - x_hat * along) * rstd
        if dh_ptr is not None:
            dh += tl.load(dh_ptr + row * dh_stride + col, mask=mask, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + row * H + col, dh, mask=mask)
        if key_ptr is not None:
            dh *= _factor(key_ptr, token_ptr, first, start, site, THRESHOLD, SCALE, BLOCK)
        if dx_ptr is not None:
            tl.store(dx_ptr + row * H + col, dh, mask=mask)
        if dinput_bias_ptr is not None:
            dinput_bias += tl.where(mask, dh, 0.0)
    at = group * H + col
    if dw_ptr is not None:
        tl.store(dw_ptr + at, tl.sum(dw, axis=0, keep_dims=True), mask=col < H)
    if db_ptr is not None:
        tl.store(db_ptr + at, tl.sum(db, axis=0, keep_dims=True), mask=col < H)
    if dinput_bias_ptr is not None:
        tl.store(dinput_bias_ptr + at, tl.sum(dinput_bias, axis=0, keep_dims=True), mask=col < H)
