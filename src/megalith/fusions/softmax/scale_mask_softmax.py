"""Softmax of attention scores under Megatron's names, all computed by ``masked_softmax``.

Masks are bool, True where a key is hidden, and are combined with the causal mask and the window. Hidden keys get -inf;
a query without visible keys has probabilities of 0 and no gradient.

B micro-batch, A heads (np in argument names), Sq queries, Sk keys. For memory traffic and what is saved, see
``masked_softmax``.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.rows import as_rows, in_shape, not_a_view, wide
from megalith.fusions.softmax.formulas import Rows, limits, tile
from megalith.fusions.softmax.masked_softmax import FUSION, broadcasts, check_window, masked_softmax

__all__ = [
    "AttnMaskType",
    "FusedScaleMaskSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
]


class AttnMaskType(Enum):
    """Which keys attention hides in addition to a given mask: those after the query, for the causal types."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5

    @classmethod
    def of(cls, given: "Enum | str") -> "AttnMaskType":
        """The member with the name ``given``, or with the name of a member of another enum, such as Megatron's.

        Raises ConfigError for anything else.
        """
        name = given.name if isinstance(given, Enum) else given
        if isinstance(name, str) and name in cls.__members__:
            return cls[name]
        raise ConfigError(
            f"attn_mask_type must be one of {', '.join(cls.__members__)}, given as AttnMaskType.causal or as 'causal'; "
            f"got {given!r}"
        )


class ScaledUpperTriangMaskedSoftmax(torch.autograd.Function):
    """``apply(inputs, scale)``: inputs [B, Sq, Sk], causal, with the last query aligned with the last key."""

    @staticmethod
    def forward(ctx: Context, inputs: Tensor, scale: float) -> Tensor:
        return _forward(ctx, inputs, None, scale, causal=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, output_grads: Tensor) -> tuple[Tensor, None]:
        return _backward(ctx, output_grads), None


class ScaledMaskedSoftmax(torch.autograd.Function):
    """``apply(inputs, mask, scale)``: inputs [B, A, Sq, Sk]; mask bool, broadcastable, True where a key is hidden."""

    @staticmethod
    def forward(ctx: Context, inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return _forward(ctx, inputs, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, output_grads: Tensor) -> tuple[Tensor, None, None]:
        return _backward(ctx, output_grads), None, None


class ScaledSoftmax(torch.autograd.Function):
    """``apply(inputs, scale)``: inputs [B, A, Sq, Sk], all keys visible."""

    @staticmethod
    def forward(ctx: Context, inputs: Tensor, scale: float) -> Tensor:
        return _forward(ctx, inputs, None, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, output_grads: Tensor) -> tuple[Tensor, None]:
        return _backward(ctx, output_grads), None


class SoftmaxOne(torch.nn.Module):
    """Softmax over keys with a sink: exp(x) / (sum of exp(x) + exp(offset)).

    Args:
        dim: the dimension of the keys; must be the last one, which None stands for.
        denominator_offset: the sink's logit: [A], one per head, a parameter if it is learned; or a number for all
            heads. 0 adds one to the denominator, as in the off-by-one softmax. Megatron's default is 1.0, but calling
            its module raises unless it is a tensor; as a logit, 1.0 would add e.

    Raises ConfigError for another dimension.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 0.0) -> None:
        super().__init__()
        if dim not in (None, -1, 3):
            raise ConfigError(f"dim must be -1 or 3, the keys of scores [B, A, Sq, Sk]; got {dim}")
        if isinstance(denominator_offset, Tensor) and not isinstance(denominator_offset, torch.nn.Parameter):
            self.register_buffer("denominator_offset", denominator_offset, persistent=False)
        else:
            self.denominator_offset = denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Returns the probabilities of ``x`` [B, A, Sq, Sk]."""
        sink = self.denominator_offset
        return masked_softmax(x, sink=sink if isinstance(sink, Tensor) else x.new_full(x.shape[-3:-2], sink))


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores.

    Args:
        input_in_fp16: scores must be float16.
        input_in_bf16: scores must be bfloat16. With neither, any floating-point dtype is accepted.
        attn_mask_type: causal and padding_causal hide the keys after a query in addition to the mask; no_mask accepts
            no mask. An AttnMaskType, a member of another enum with the same name, such as Megatron's, or the name.
        scaled_masked_softmax_fusion: use ``forward_fused_softmax``, or raise; otherwise ``forward_torch_softmax``.
        mask_func: (scores, mask) -> scores, for the torch path only; without it, and on the fused path, hidden scores
            become -inf.
        softmax_in_fp32: ``mask_func`` gets scores in float32, which no fill value overflows. The softmax itself always
            computes in float32.
        scale: multiplies the scores; None is 1.
        window_size: number of keys visible before and after a query's own, -1 for all; None for no window.

    Raises ConfigError for both dtypes, an unknown mask type, an invalid window, or a scale without ``softmax_in_fp32``.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Enum | str,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ConfigError(
                "input_in_fp16 and input_in_bf16 must not both be set: scores have one dtype; set one, or neither"
            )
        check_window(window_size)
        if scale is not None and not softmax_in_fp32:
            raise ConfigError(
                f"scale={scale} requires softmax_in_fp32=True, because scaled 16-bit scores could overflow"
            )
        self.input_dtype = torch.float16 if input_in_fp16 else torch.bfloat16 if input_in_bf16 else None
        self.attn_mask_type = AttnMaskType.of(attn_mask_type)
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Returns the probabilities of ``input`` [B, A, Sq, Sk], in its dtype.

        Args:
            input: scores.
            mask: bool, True where a key is hidden, [1 | B, 1 | A, 1 | Sq, 1 | Sk]; or None.
            softmax_offset: the logit of each head's sink, [A].

        Raises:
            ShapeError: scores of another dtype than configured, or a mask or sink that does not fit them.
            ConfigError: a mask although ``attn_mask_type`` is no_mask.
        """
        fused = self.scaled_masked_softmax_fusion
        return (self.forward_fused_softmax if fused else self.forward_torch_softmax)(input, mask, softmax_offset)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """``forward`` using ``masked_softmax``, on the path chosen for ``input``."""
        self._check(input, mask)
        return masked_softmax(
            input,
            mask,
            causal=self._causal,
            window=self.window_size,
            scale=1.0 if self.scale is None else self.scale,
            sink=softmax_offset,
        )

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """``forward`` in plain torch, masked by ``mask_func``."""
        self._check(input, mask)
        x = input.float() if self.softmax_in_fp32 and input.element_size() == 2 else input
        x = x if self.scale is None else x * self.scale
        hidden = self._hidden(input, mask)
        if hidden is not None:
            if self.mask_func is None:
                x = x.masked_fill(hidden, float("-inf"))
            else:
                # Megatron's functions write into their argument
                x = self.mask_func(x.clone() if x is input else x, hidden)
        return masked_softmax(x, sink=softmax_offset, backend="reference").to(input.dtype)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether ``forward`` takes the fused path for scores [b, np, sq, sk]: any size, if the mask fits them."""
        fits = mask is None or (mask.dtype == torch.bool and broadcasts(mask, (b, np, sq, sk)))
        wanted = mask is None or self.attn_mask_type is not AttnMaskType.no_mask
        return self.scaled_masked_softmax_fusion and fits and wanted

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Number of rows of scores [b, np, sq, sk] that a program of our kernels processes at a time."""
        return min(b * np * sq, tile(sk)[0])

    @property
    def _causal(self) -> bool:
        return self.attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)

    def _check(self, scores: Tensor, mask: Tensor | None) -> None:
        if scores.dim() != 4:
            raise ShapeError(f"input must be scores [B, A, Sq, Sk]; got {list(scores.shape)}")
        if self.input_dtype not in (None, scores.dtype):
            raise ShapeError(f"input must be {self.input_dtype}, as set at construction; got {scores.dtype}")
        if mask is not None and self.attn_mask_type is AttnMaskType.no_mask:
            raise ConfigError("mask must be None with AttnMaskType.no_mask; pass None, or use AttnMaskType.arbitrary")

    def _hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask, the window and causality combined into one mask, or None if nothing is hidden."""
        Sq, Sk = scores.shape[-2:]
        of_a_head = Rows(1, Sq, Sk, *limits(self._causal, self.window_size, Sq, Sk))
        outside = of_a_head.hidden(slice(0, Sq), slice(0, Sk), None, scores.device)
        return outside if mask is None else mask if outside is None else mask | outside


def _forward(ctx: Context, scores: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    ctx.backend, ctx.options = FUSION.choose_for_function(scores), (causal, float(scale))
    p = not_a_view(masked_softmax(scores, mask, causal=causal, scale=scale, backend=ctx.backend))
    ctx.save_for_backward(p)
    return p


def _backward(ctx: Context, dp: Tensor) -> Tensor:
    (p,), (causal, scale) = ctx.saved_tensors, ctx.options
    *_, A, Sq, Sk = p.shape
    if Sk == 0:
        return dp  # empty
    settings = A, Sq, *limits(causal, None, Sq, Sk), scale, None  # no sink
    dx, _ = FUSION.backs[ctx.backend](as_rows(dp), as_rows(p), p.new_empty(0, dtype=wide(p.dtype)), *settings)
    return in_shape(dx, p.shape)
