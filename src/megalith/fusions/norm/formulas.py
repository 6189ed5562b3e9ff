"""Formulas of ``norm.paths``, stated there: the row layout, what is saved for backward, and the reference.

T rows, H features each.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.dropout_mask import Mask, keep
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import fresh_like, wide
from megalith.torch_compat.tensors import forward_mode_is_on

__all__ = [
    "OPERATOR",
    "OPERATOR_OF_SUM",
    "PROGRAMS",
    "WIDEST_WHOLE_ROW",
    "Kept",
    "Normalization",
    "Norming",
    "Options",
    "OptionsOfBack",
    "as_stored",
    "dropped",
    "float_gain",
    "gradients",
    "nested_rows",
    "outputs",
    "reference",
    "rows_per_program",
    "statistics",
    "summed",
]

Normalization = Literal["LayerNorm", "RMSNorm"]

# the widest row that a kernel holds in the registers of 512 threads; twice that would spill. Wider rows are read in
# tiles, the second time from cache
WIDEST_WHOLE_ROW = 2**14
PROGRAMS = 512  # of the backward kernel; untuned, several per multiprocessor of current GPUs


class Options(NamedTuple):
    """The last operands of the operator."""

    key: Tensor | None
    tokens: Tensor | None
    site: int
    p: float
    eps: float
    normalization: str
    zero_centered: bool


class OptionsOfBack(NamedTuple):
    """The last operands of the backward operator."""

    key: Tensor | None
    tokens: Tensor | None
    site: int
    p: float
    zero_centered: bool
    mean: Tensor
    rstd: Tensor
    x_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    input_bias_dtype: torch.dtype | None
    needs: list[bool]


class Norming(NamedTuple):
    """The options of a norm."""

    mask: Mask
    eps: float
    normalization: str
    zero_centered: bool

    @classmethod
    def of(cls, *options: Unpack[Options]) -> "Norming":
        """From the last operands of the operator."""
        return cls(Mask(*options[:4]), *options[4:])


class Kept(NamedTuple):
    """What backward gets besides the gradients, h and the weight."""

    mask: Mask
    zero_centered: bool
    mean: Tensor
    rstd: Tensor
    x_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    input_bias_dtype: torch.dtype | None
    needs: list[bool]

    @classmethod
    def of(cls, *options: Unpack[OptionsOfBack]) -> "Kept":
        """From the last operands of the backward operator."""
        return cls(Mask(*options[:4]), *options[4:])


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    *options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """y of rows ``x`` [..., H] in its dtype, and h in that of ``residual``, empty without a residual."""
    mask, eps, normalization, zero_centered = Norming.of(*options)
    h = x.to(wide(x.dtype)) if residual is None else summed(x, residual, input_bias, mask)
    stored = h.new_empty(0) if residual is None else h.to(residual.dtype)
    h = h if residual is None else as_stored(h, residual.dtype)
    mean, rstd = statistics(h, eps, normalization)
    y = (h if mean is None else h - mean) * rstd
    y = y if weight is None else y * float_gain(y, weight, zero_centered)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype), stored


def summed(x: Tensor, residual: Tensor, input_bias: Tensor | None, mask: Mask) -> Tensor:
    """h of rows [..., H] in float32 or wider, before rounding."""
    acc = wide(torch.promote_types(x.dtype, residual.dtype))
    h = x.to(acc) if input_bias is None else x.to(acc) + input_bias.to(acc)
    return dropped(h, mask) + residual.to(acc)


def dropped(h: Tensor, mask: Mask) -> Tensor:
    """Rows ``h`` [..., H] times their mask / (1 - p); unchanged without dropout."""
    if mask.key is None:
        return h
    T, H = h.shape[:-1].numel(), h.shape[-1]
    kept = keep(mask.key, mask.tokens, mask.site, mask.p, T, H, 0).view(h.shape)
    # a product, so that NaN and inf propagate as in torch's dropout
    return h * kept * (1.0 / (1.0 - mask.p))


def statistics(h: Tensor, eps: float, normalization: str) -> tuple[Tensor | None, Tensor]:
    """Mean, None for RMSNorm, and rstd, [..., 1], of rows in float32 or wider."""
    mean = h.mean(dim=-1, keepdim=True) if normalization == "LayerNorm" else None
    centred = h if mean is None else h - mean
    return mean, torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)


def float_gain(h: Tensor, weight: Tensor | None, zero_centered: bool, acc: torch.dtype | None = None) -> Tensor:
    """The gain [H] in ``acc``, by default the dtype that ``h`` is computed in."""
    acc = acc or wide(h.dtype)
    if weight is None:
        return h.new_ones(h.shape[-1], dtype=acc)
    return 1.0 + weight.to(acc) if zero_centered else weight.to(acc)


class _Rounding(torch.autograd.Function):
    """Rounds to a narrower dtype but returns the wide one; the gradient passes through unrounded."""

    @staticmethod
    def forward(h: Tensor, dtype: torch.dtype) -> Tensor:
        return h.to(dtype).to(h.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, h: Tensor, _: None) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        return dh, None


def as_stored(h: Tensor, dtype: torch.dtype) -> Tensor:
    """Wide rows ``h`` rounded to ``dtype``; their gradient is not rounded."""
    if h.dtype == dtype:
        return h
    if not h.requires_grad and not forward_mode_is_on():  # a Function inspects a signature in every call
        return h.to(dtype).to(h.dtype)
    rounded: Tensor = _Rounding.apply(h, dtype)
    return rounded


def nested_rows(x: Tensor) -> Tensor:
    """``x`` [..., H] as [M, N, H], without a copy if two strides can address every row; otherwise N is 1.

    This covers the heads [S, B, A, D] of a packed query-key-value projection: M is S B, and N is A.
    """
    T, H = x.shape[:-1].numel(), x.shape[-1]
    if x.is_contiguous():
        return x if x.shape == (T, 1, H) else x.view(T, 1, H)
    steps = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    breaks = [i for i in range(1, len(steps)) if steps[i - 1][1] != steps[i][0] * steps[i][1]]
    if T == 0 or len(breaks) != 1:
        return x.reshape(T, 1, H)
    num_outer = math.prod(size for size, _ in steps[: breaks[0]])
    return x.view(num_outer, T // num_outer, H)


def rows_per_program(num_rows: int, at_once: int, num_tiles: int, num_programs: int = PROGRAMS) -> int:
    """The number of rows that a program of the backward kernel sums up, ``at_once`` of them per step.

    At least ``num_programs`` programs; each additional one writes and reads another partial dw.
    """
    return at_once * max(1, num_rows * num_tiles // (num_programs * at_once))


def outputs(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    *options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized y, h (empty without a residual), mean (empty for RMSNorm) and rstd, the last two [..., 1]."""
    normalization = Options(*options).normalization
    h_dtype = x.dtype if residual is None else residual.dtype
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=wide(torch.promote_types(x.dtype, h_dtype)))
    mean = torch.empty_like(rstd) if normalization == "LayerNorm" else rstd.new_empty(0)
    h = x.new_empty(0, dtype=h_dtype) if residual is None else fresh_like(x, h_dtype)
    return fresh_like(x), h, mean, rstd


def gradients(
    dy: Tensor | None,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    *options: Unpack[OptionsOfBack],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized dx, dresidual, dw, db and dinput_bias; empty if ``needs`` is False for them."""
    kept = OptionsOfBack(*options)
    needs, H, nothing = kept.needs, h.shape[-1], h.new_empty(0)
    dx = fresh_like(h, kept.x_dtype) if needs[0] else nothing
    dresidual = fresh_like(h) if needs[1] else nothing
    dw = nothing if weight is None or not needs[2] else weight.new_empty(H)
    db = h.new_empty(H, dtype=kept.bias_dtype) if needs[3] else nothing
    dinput_bias = h.new_empty(H, dtype=kept.input_bias_dtype) if needs[4] else nothing
    return dx, dresidual, dw, db, dinput_bias


def _saves(
    outputs: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    *options: Unpack[Options],
) -> tuple[object, ...]:
    mask, zero_centered = options[:4], options[6]
    _, h, mean, rstd = outputs
    dtypes = (None if vector is None else vector.dtype for vector in (bias, input_bias))
    return x if residual is None else h, weight, *mask, zero_centered, mean, rstd, x.dtype, *dtypes


def _shares(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    key: Tensor | None,
    *_: object,
) -> dict[str, str]:
    """Without dropout, x and residual have the same gradient, which is written once if their dtypes agree."""
    return {"residual": "x"} if residual is not None and key is None and x.dtype == residual.dtype else {}


OPERATOR = Operator(
    outputs,
    gradients,
    of=("x", "residual", "weight", "bias", "input_bias"),
    saves=_saves,
    shares=_shares,
    num_differentiable=2,
    absent_as_none=True,
)
# rows are contiguous here, while those of a plain norm may be nested; h is both saved for backward and returned
OPERATOR_OF_SUM = dataclasses.replace(OPERATOR, rows=("x", "residual", "dy", "dh", "h"))
