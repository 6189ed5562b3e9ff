"""Rotary position embedding of queries and keys in one launch, optionally after an RMSNorm of each head.

    x        = x / sqrt(mean over D of x^2 + eps) * weight       with QK norm; weight + 1 if zero-centered
    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)                for each pair of features; the rest is copied
    dx       = the inverse rotation of dy, with the same tables; then the gradient of the norm

Su et al. 2021, "RoFormer", arXiv:2104.09864. Henry et al. 2020, "Query-Key Normalization", arXiv:2010.04245. Sections
of the pairs for time, height and width: Wang et al. 2024, "Qwen2-VL", arXiv:2409.12191.

S sequence, B micro-batch, A heads, G kv groups, D head size, R rotated features. Saved for backward: only the tables;
with QK norm also q, k and 1 / root mean square of each head, in float32.
Lower bound: forward and backward 2SB(A + G)D elements each, with QK norm 3SB(A + G)D in backward; tables are read once.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping
from typing import TypeVar, Unpack

from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import in_shape
from megalith.fusions.rope.formulas import Operands, Outputs, blocked, compiled, reference
from megalith.fusions.rope.rotation import Layout, Rotation, check_layout, tables

__all__ = ["FUSION", "fused_rope"]

Keys = TypeVar("Keys", Tensor, None)


def fused_rope(
    q: Tensor,
    k: Keys,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    layout: Layout = "neox",
    rotary_dim: int | None = None,
    inverse: bool = False,
    sections: tuple[int, int, int] | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Keys]:
    """Returns queries and keys rotated by their positions, in fresh memory.

    Args:
        q: [S, B, A, D], or [T, A, D] for packed documents. Any strides, such as a slice of a packed QKV.
        k: [S, B, G, D] or [T, G, D], for the same tokens; or None.
        cos, sin: [rows, R/2], where token s uses row s or that given by ``positions``; or [S, B, R/2]. Preferably
            float32, whatever the dtype of q. They are not differentiable, and must not require a gradient.
        positions: int32 or int64 [S] or [S, B], rows of the tables; with ``sections`` [3, S] or [3, S, B]. A row out of
            range raises on the CPU, and yields NaN in a kernel, which cannot raise.
        layout: which features form a pair: "neox" i and i + R/2 (Hugging Face's Llama), "interleaved" 2i and 2i + 1
            (RoFormer); "deepseek" reads 2i and 2i + 1 and writes i and i + R/2.
        rotary_dim: R, the number of leading columns that are rotated; the others are copied. Defaults to D.
        inverse: undoes the rotation; with "deepseek" it reads the layout that the rotation writes.
        sections: how many of the R/2 pairs use the time, height and width position of a token (mRoPE).
        q_norm_weight, k_norm_weight: [D], gains of an RMSNorm of each head, applied before the rotation.
        eps: added to the mean square.
        zero_centered: gains are 1 + weight.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        q and k, contiguous, each in its shape and dtype; None if k is None.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: an unknown layout, sections that do not sum to R/2, tables that require a gradient, or a setting
            that would have no effect.
        BackendError: ``backend`` cannot run on ``q``.
    """
    R = q.shape[-1] if rotary_dim is None and q.dim() else rotary_dim or 0
    how = Rotation(layout, inverse, 0, tuple(sections or ()), eps, zero_centered)
    _check(q, k, q_norm_weight, k_norm_weight, R, how)
    check_floating(cos=cos, sin=sin)
    gains = {"q_norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight}
    check_one_device(q=q, k=k, cos=cos, sin=sin, positions=positions, **gains)
    compute = FUSION.path(q, backend)
    heads = q if q.dim() == 4 else q.unsqueeze(1)
    k_heads = k if k is None or k.dim() == 4 else k.unsqueeze(1)
    S, B = heads.shape[:2]
    table = tables(cos, sin, positions, S, B, R, num_streams=3 if sections else 1)
    y, y_k, *_ = compute(heads, k_heads, *table, q_norm_weight, k_norm_weight, *how)
    return in_shape(y, q.shape), None if k is None else in_shape(y_k, k.shape)


def _triton(*operands: Unpack[Operands]) -> Outputs:
    from megalith.fusions.rope.kernels.rope import op

    return op(*operands)


_PATHS: Mapping[Backend, Callable[..., Outputs]] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("rope", _PATHS, defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")}))


def _check(
    q: Tensor,
    k: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    R: int,
    how: Rotation,
) -> None:
    check_layout(how.layout)
    check_floating(q=q, k=k, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    if q.dim() not in (3, 4):
        raise ShapeError(f"q must be [S, B, A, D], or [T, A, D] for packed documents; got {list(q.shape)}")
    D = q.shape[-1]
    if R % 2 or not 0 < R <= D:
        raise ShapeError(f"rotary_dim must be even, positive and at most the head size {D}; got {R}")
    if k is not None:
        check_shape("k", k, (*q.shape[:-2], k.shape[-2] if k.dim() > 1 else 0, D), "with the tokens and head size of q")
    check_shape("q_norm_weight", q_norm_weight, (D,), "one for each feature of a head")
    check_shape("k_norm_weight", k_norm_weight, (D,), "one for each feature of a head")
    if k is None and k_norm_weight is not None:
        raise ConfigError("k_norm_weight has no effect without k; leave it out")
    if q_norm_weight is None and k_norm_weight is None:
        if how.zero_centered:
            raise ConfigError("zero_centered has no effect without q_norm_weight or k_norm_weight; leave it out")
    elif how.inverse:
        raise ConfigError("inverse cannot be combined with QK norm, which has no inverse; leave one of them out")
    if how.sections and (len(how.sections) != 3 or min(how.sections) < 0 or sum(how.sections) != R // 2):
        raise ConfigError(
            f"sections must be three non-negative numbers of pairs that sum to {R // 2}; got {tuple(how.sections)}"
        )
