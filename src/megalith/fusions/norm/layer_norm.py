"""LayerNorm and RMSNorm for any hidden size: functions, and modules under the usual names.

    LayerNorm  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * g + b
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * g

The gain g is the weight, or 1 + weight if zero-centered. For gradients, sources, and what is saved for backward, see
``norm.paths``.
Lower bound: 2TH elements in forward and 3TH in backward; saved: x and 4 or 8 bytes per token.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from megalith.errors import ConfigError
from megalith.fusions.core.dispatch import Backend, Fusion, Operand
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import in_shape, wide
from megalith.fusions.norm.formulas import (
    WIDEST_WHOLE_ROW,
    Normalization,
    Norming,
    Options,
    float_gain,
    nested_rows,
    reference,
)
from megalith.fusions.norm.paths import PATHS, Norm, check

__all__ = [
    "LAYER_NORM_FUSION",
    "RMS_NORM_FUSION",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "fused_layer_norm",
    "fused_rms_norm",
]


def fused_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Applies LayerNorm over the last dimension.

    Args:
        x: [..., H], floating point, with any strides; heads inside a packed projection are not copied.
        weight: [H], often float32 while ``x`` is bfloat16; None for a gain of 1.
        bias: [H].
        eps: added to the variance.
        zero_centered: the gain is 1 + weight, computed in float32.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., H] in the dtype of ``x``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: a negative eps, or a zero-centered gain without a weight.
        BackendError: ``backend`` cannot run on ``x``.
    """
    return _norm(LAYER_NORM_FUSION, x, weight, bias, eps, "LayerNorm", zero_centered, backend)


def fused_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Applies RMSNorm over the last dimension, like ``fused_layer_norm`` without mean and bias."""
    return _norm(RMS_NORM_FUSION, x, weight, None, eps, "RMSNorm", zero_centered, backend)


def _norm(
    fusion: Fusion[Norm],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalization: Normalization,
    zero_centered: bool,
    backend: Backend | None,
) -> Tensor:
    check(x, weight, bias, eps, normalization, zero_centered)
    compute = fusion.path(x, backend)
    # a view would cost autograd more than a small norm takes
    rows = x if compute in _OF_ANY_SHAPE and x.is_contiguous() else nested_rows(x)
    y, *_ = compute(rows, None, weight, bias, None, None, None, 0, 0.0, float(eps), normalization, zero_centered)
    return in_shape(y, x.shape)


class _FusedNorm(nn.Module):
    """Common base of both modules. Attributes of ``config`` take precedence if present, as in Megatron."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        config: object,
        hidden_size: int,
        eps: float,
        persist_layer_norm: bool | None,
        zero_centered_gamma: bool,
        has_bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ConfigError(f"hidden_size must be 1 or more; got {hidden_size}")
        persists = _setting(config, "persist_layer_norm", "persist_layer_norm", persist_layer_norm, None)
        if persists and hidden_size > WIDEST_WHOLE_ROW:
            raise ConfigError(
                f"persist_layer_norm keeps a row in registers, which hold at most {WIDEST_WHOLE_ROW} columns; got "
                f"hidden_size={hidden_size}; use persist_layer_norm=False, which reads a row in tiles"
            )
        if getattr(config, "memory_efficient_layer_norm", False):
            raise ConfigError(
                "memory_efficient_layer_norm recovers the input by dividing the output by the gain, which may be 0; "
                "leave it off, and recompute the norm to save the same memory"
            )
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered_gamma = _setting(
            config, "layernorm_zero_centered_gamma", "zero_centered_gamma", zero_centered_gamma, False
        )
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if has_bias else None
        parameters: Iterable[Any] = self.parameters()
        for parameter in parameters:  # Megatron-style trainers all-reduce these gradients over tp
            parameter.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the gain to 1 (a weight of 0 if zero-centered) and the bias to 0."""
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class FusedLayerNorm(_FusedNorm):
    """LayerNorm with a weight and a bias [H], as a module.

    Args:
        config: any object, or None. If it has an attribute ``persist_layer_norm``, ``layernorm_zero_centered_gamma`` or
            ``normalization``, that value is used, and arguments must not contradict it; ``sequence_parallel`` is copied
            to the parameters.
        hidden_size: H.
        eps: added to the variance.
        persist_layer_norm: True if a whole row must fit the registers of a program, so that forward reads it once. None
            and False also allow wider rows, which are read in tiles. The result is the same.
        zero_centered_gamma: the gain is 1 + weight, and weight is initialized to 0.
        normalization: "LayerNorm"; for "RMSNorm" use FusedRMSNorm.
        device, dtype: of the parameters, as in torch's modules.

    Raises:
        ConfigError: a row too wide to persist, another normalization, arguments that contradict ``config``.
    """

    bias: nn.Parameter

    def __init__(
        self,
        config: object,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool | None = None,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_normalization(config, normalization, "LayerNorm", "FusedRMSNorm")
        super().__init__(config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, True, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., H] in the dtype of ``input``."""
        return fused_layer_norm(input, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class FusedRMSNorm(_FusedNorm):
    """RMSNorm with a weight [H], as a module; arguments and errors as for FusedLayerNorm, except the normalization."""

    bias: None

    def __init__(
        self,
        config: object,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool | None = None,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_normalization(config, normalization, "RMSNorm", "FusedLayerNorm")
        super().__init__(config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, False, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., H] in the dtype of ``input``."""
        return fused_rms_norm(input, self.weight, self.eps, self.zero_centered_gamma)


def _setting(config: object, attribute: str, argument: str, given: bool | None, default: bool | None) -> bool:
    """Returns the value in ``config``, else ``given``. Raises ConfigError if a non-default ``given`` contradicts it."""
    asked = bool(getattr(config, attribute, given))
    if given not in (default, asked):
        raise ConfigError(f"{argument}={given} contradicts config.{attribute}={asked}; set only one of them")
    return asked


def _check_normalization(config: object, given: str, wanted: Normalization, other: str) -> None:
    for asked in (given, getattr(config, "normalization", wanted)):
        if asked != wanted:
            raise ConfigError(f"normalization must be {wanted!r} here; got {asked!r}; use {other}")


def _torch_rms_norm(
    x: Tensor, residual: None, weight: Tensor | None, bias: None, input_bias: None, *options: Unpack[Options]
) -> tuple[Tensor]:
    """torch's operator, which rounds once if the gain has the dtype of ``x``; with another dtype it would be slow."""
    _, eps, _, zero_centered = Norming.of(*options)
    gain = float_gain(x, weight, zero_centered) if zero_centered else weight
    if gain is None or gain.dtype == x.dtype:
        return (nn.functional.rms_norm(x, x.shape[-1:], gain, eps),)
    acc = wide(x.dtype)
    return (nn.functional.rms_norm(x.to(acc), x.shape[-1:], gain.to(acc), eps).to(x.dtype),)


def _torch_layer_norm(
    x: Tensor, residual: None, weight: Tensor | None, bias: Tensor | None, input_bias: None, *options: Unpack[Options]
) -> tuple[Tensor]:
    _, eps, _, zero_centered = Norming.of(*options)
    gain = None if weight is None else float_gain(x, weight, zero_centered)
    return (nn.functional.layer_norm(x, x.shape[-1:], gain, None if bias is None else bias.to(x.dtype), eps),)


_OF_ANY_SHAPE = (_torch_rms_norm, _torch_layer_norm, reference)  # these take [..., H], not only rows


def _why_not_torch_layer_norm(x: Operand) -> str | None:
    if x.dtype == wide(x.dtype):
        return None
    return (
        "torch's CPU kernel keeps 16-bit statistics for 16-bit inputs, and rounds partial sums of the gain's gradient"
    )


LAYER_NORM_FUSION = registered(
    Fusion(
        "layer_norm",
        {**PATHS, "aten": _torch_layer_norm},
        limits={"aten": _why_not_torch_layer_norm},
        defaults={"cuda": ("triton",), "cpu": ("aten", "blocked")},
    )
)
# whole="aten": for few rows, the reference spends most of its time on the overhead of eight operators
RMS_NORM_FUSION = registered(
    Fusion(
        "rms_norm",
        {**PATHS, "aten": _torch_rms_norm},
        whole="aten",
        defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")},
    )
)
