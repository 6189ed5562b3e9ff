"""LayerNorm and RMSNorm of any hidden size: functions, and modules under the names that the field knows.

    LayerNorm  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * g + b
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * g

The gain g is the weight, or 1 + weight where it is zero-centred. Formulas of the gradients, sources, and what is kept
for them: the head of ``norm.paths``.
Floor: 2TH elements in forward and 3TH in backward; saved: x and 4 or 8 bytes a token.
"""

# ruff: noqa: UP044  a star would ask the class of a record for its fields, which has none to give

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
    """LayerNorm over the last dimension.

    Args:
        x: [..., H], floating; any strides, of which heads inside a packed projection cost no copy.
        weight: [H], often float32 while ``x`` is bfloat16; None for a gain of 1.
        bias: [H].
        eps: added to the variance.
        zero_centered: the gain is 1 + weight, formed in float32.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        [..., H] in the dtype of ``x``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: a negative eps, or a zero-centred gain without a weight.
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
    """RMSNorm over the last dimension: as ``fused_layer_norm``, with no mean and no bias."""
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
    # a view would cost autograd more than a small norm does
    rows = x if compute in _OF_ANY_SHAPE and x.is_contiguous() else nested_rows(x)
    y, *_ = compute(rows, None, weight, bias, None, None, None, 0, 0.0, float(eps), normalization, zero_centered)
    return in_shape(y, x.shape)


class _FusedNorm(nn.Module):
    """What both modules share. Attributes of ``config`` decide where it has them, as where the field builds these."""

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
                f"persist_layer_norm keeps a row in registers, and they hold {WIDEST_WHOLE_ROW} of hidden_size "
                f"{hidden_size}; give persist_layer_norm=False, which reads a row in tiles"
            )
        if getattr(config, "memory_efficient_layer_norm", False):
            raise ConfigError(
                "memory_efficient_layer_norm finds the input again by dividing the output by the gain, which may be 0; "
                "leave it off, and recompute the norm to save as much"
            )
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered_gamma = _setting(
            config, "layernorm_zero_centered_gamma", "zero_centered_gamma", zero_centered_gamma, False
        )
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if has_bias else None
        parameters: Iterable[Any] = self.parameters()
        for parameter in parameters:  # trainers of the field sum such gradients over the ranks of tp
            parameter.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the gain to 1, which is a weight of 0 where it is zero-centred, and the bias to 0."""
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class FusedLayerNorm(_FusedNorm):
    """LayerNorm with a weight and a bias [H], as a module.

    Args:
        config: any object. Where it has an attribute ``persist_layer_norm``, ``layernorm_zero_centered_gamma`` or
            ``normalization``, that decides, and an argument may not say otherwise; ``sequence_parallel`` is noted on
            the parameters. None has none of them.
        hidden_size: H.
        eps: added to the variance.
        persist_layer_norm: True if a whole row must fit the registers of a program, so that forward reads it once.
            None and False also allow wider rows, which are read in tiles. All compute the same.
        zero_centered_gamma: the gain is 1 + weight, and weight begins at 0.
        normalization: "LayerNorm"; for "RMSNorm" there is FusedRMSNorm.
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
        """[..., H] in the dtype of ``input``."""
        return fused_layer_norm(input, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class FusedRMSNorm(_FusedNorm):
    """RMSNorm with a weight [H], as a module; arguments and errors are those of FusedLayerNorm, by its own name."""

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
        """[..., H] in the dtype of ``input``."""
        return fused_rms_norm(input, self.weight, self.eps, self.zero_centered_gamma)


def _setting(config: object, attribute: str, argument: str, given: bool | None, default: bool | None) -> bool:
    """What ``config`` says, else what was ``given``; raises ConfigError if they differ and ``given`` is no default."""
    asked = bool(getattr(config, attribute, given))
    if given not in (default, asked):
        raise ConfigError(f"{argument}={given} contradicts config.{attribute}={asked}; say it in one of the two places")
    return asked


def _check_normalization(config: object, given: str, wanted: Normalization, other: str) -> None:
    for asked in (given, getattr(config, "normalization", wanted)):
        if asked != wanted:
            raise ConfigError(f"normalization must be {wanted!r} here; got {asked!r}; take {other}")


def _torch_rms_norm(
    x: Tensor, residual: None, weight: Tensor | None, bias: None, input_bias: None, *options: Unpack[Options]
) -> tuple[Tensor]:
    """torch's operator rounds once, beside a gain of the dtype of ``x``; beside another it would take a slow way."""
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


_OF_ANY_SHAPE = (_torch_rms_norm, _torch_layer_norm, reference)  # [..., H], and not rows alone


def _why_not_torch_layer_norm(x: Operand) -> str | None:
    if x.dtype == wide(x.dtype):
        return None
    return "of 16-bit rows torch keeps 16-bit statistics on a CPU, and rounds what it adds up for the gain"


LAYER_NORM_FUSION = registered(
    Fusion(
        "layer_norm",
        {**PATHS, "aten": _torch_layer_norm},
        limits={"aten": _why_not_torch_layer_norm},
        defaults={"cuda": ("triton",), "cpu": ("aten", "blocked")},
    )
)
# of a few rows, most of the reference's time is the start of its eight operators
RMS_NORM_FUSION = registered(
    Fusion(
        "rms_norm",
        {**PATHS, "aten": _torch_rms_norm},
        whole="aten",
        defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")},
    )
)
