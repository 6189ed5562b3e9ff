"""Scaled softmax over the keys visible to a query: masks, causal and sliding windows, attention sinks; any length.

    s = scale * x,   -inf where hidden          m = max over keys of s, and o
    p = exp(s - m) / (sum over keys of exp(s - m) + exp(o - m))      0 in a row without visible keys
    r = sum over keys of dp * p
    dx = scale * p * (dp - r);   do = - sum over queries of r * exp(o - m) / (the denominator of p)

o is a head's sink (Xiao et al. 2023, arXiv:2309.17453): a learned logit without a key; 0 gives the off-by-one softmax.
Without a sink the terms in o are absent. Rows wider than a block use online softmax (arXiv:1805.02867).

B micro-batch, A heads, Sq queries, Sk keys, S = B A Sq Sk scores. Saved for backward: p, and 4 bytes per row with a
sink. Lower bound: forward reads the visible scores and writes S, backward reads p and dp there and writes S.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.softmax.formulas import BackSettings, Settings, blocked, limits, reference, reference_back

__all__ = ["FUSION", "broadcasts", "check_window", "masked_softmax"]


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float = 1.0,
    sink: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Returns the softmax of ``scores``; hidden keys get probability 0 and no gradient.

    Args:
        scores: [B, A, Sq, Sk], or [A, Sq, Sk].
        mask: bool, True where a key is hidden; any shape that broadcasts to that of ``scores``.
        causal: hides the keys after a query. The last query is aligned with the last key, even if Sq and Sk differ.
        window: number of keys visible before and after a query's own, which is visible too; -1 is no limit. Applied in
            addition to the other masks.
        scale: multiplies the scores before anything else.
        sink: [A], a logit per head that is part of the denominator but belongs to no key.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        Probabilities in the shape and dtype of ``scores``. A row sums to 1, or to less with a sink; a row without
        visible keys is 0.

    Raises:
        ShapeError: the tensors do not fit together, or the mask is not bool.
        ConfigError: a window with limits below -1, or not of length two.
        BackendError: ``backend`` cannot run on ``scores``.
    """
    _check(scores, mask, window, sink)
    *_, A, Sq, Sk = scores.shape
    if Sk == 0:
        return scores * scale  # empty, which reductions reject
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    compute = FUSION.path(scores, backend)
    p, _ = compute(scores, mask, sink, A, Sq, *limits(causal, window, Sq, Sk), float(scale))
    return p


def _triton(x: Tensor, mask: Tensor | None, sink: Tensor | None, *settings: Unpack[Settings]) -> tuple[Tensor, Tensor]:
    from megalith.fusions.softmax.kernels.softmax import op

    return op(x, mask, sink, *settings)


def _triton_back(dp: Tensor, p: Tensor, share: Tensor, *settings: Unpack[BackSettings]) -> tuple[Tensor, Tensor]:
    from megalith.fusions.softmax.kernels.softmax import op

    return op.back(dp, p, share, *settings)


_PATHS: Mapping[Backend, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _triton,
    "compile": compiled(reference),
    "blocked": blocked,
    "reference": reference,
}
_BACKS: Mapping[Backend, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _triton_back,
    "compile": compiled(reference_back),
    "blocked": blocked.back,
    "reference": reference_back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("blocked",)}
FUSION = registered(Fusion("masked_softmax", _PATHS, defaults=_DEFAULTS, backs=_BACKS))


def check_window(window: tuple[int, int] | None) -> None:
    """Raises ConfigError unless ``window`` is None or two limits of -1 or more."""
    if window is not None and (not isinstance(window, Sequence) or len(window) != 2 or min(window) < -1):
        raise ConfigError(
            f"a window must be two numbers of keys, before and after a query's own, or -1 for no limit; got {window}"
        )


def broadcasts(mask: Tensor, shape: Sequence[int]) -> bool:
    """Whether ``mask`` broadcasts to ``shape`` without enlarging it."""
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    return mask.dim() <= len(shape) and all(size in (1, of) for size, of in sizes)


def _check(scores: Tensor, mask: Tensor | None, window: tuple[int, int] | None, sink: Tensor | None) -> None:
    check_floating(scores=scores, sink=sink)
    check_one_device(scores=scores, mask=mask, sink=sink)
    check_window(window)
    if scores.dim() not in (3, 4):
        raise ShapeError(f"scores must be [B, A, Sq, Sk] or [A, Sq, Sk]; got {list(scores.shape)}")
    if mask is not None and mask.dtype != torch.bool:
        raise ShapeError(
            f"mask must be bool, True where a key is hidden; got {mask.dtype}; pass mask != 0, or mask < 0"
        )
    if mask is not None and not broadcasts(mask, scores.shape):
        raise ShapeError(f"mask must broadcast to scores {list(scores.shape)}; got {list(mask.shape)}")
    check_shape("sink", sink, scores.shape[-3:-2], "one logit for each head of scores")
