"""Rotary embedding for multi-latent attention, of the last columns of each query and of the key that heads share.

    q' = [q_nope | rotate(q_pe)]
    k  = [kv_nope | rotate(k_pe)] for each head, v = the remaining columns of kv
    dkv = [dk_nope | dv],  dk_pe = inverse rotation of (sum over A of the last columns of dk)

DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434; tables usually those of YaRN (``yarn_cos_sin``), arXiv:2309.00071.
A pair of the ``emb_dim`` features is read from columns 2i and 2i + 1, and written to i and i + emb_dim/2.

S sequence, B micro-batch, A heads, T packed tokens; columns of a head: K = qk_head_dim = k_dim, R = emb_dim, V = v_dim.
Saved for backward: only the tables and positions.
Lower bound: q forward and backward 2SBA(K + R) elements each; kv forward and backward SBA(2K + 2V + R) + SBR.
Keys and values are written once, where attention reads them: no split, no expansion of k_pe, no concatenation.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import in_shape, not_a_view
from megalith.fusions.rope.mla_formulas import blocked, compiled, reference, reference_back
from megalith.fusions.rope.mla_tables import Positions, check_heads, mla_tables
from megalith.fusions.rope.rope import FUSION as ROPE
from megalith.fusions.rope.rotation import Rotation, Tables

__all__ = [
    "FUSION",
    "ApplyMLARotaryEmbKV",
    "ApplyMLARotaryEmbQ",
    "fused_apply_mla_rope_for_kv",
    "fused_apply_mla_rope_for_q",
    "fused_mla_rope_inplace",
    "fused_mla_rope_kv_split",
    "fused_mla_rope_out_of_place",
]


def fused_apply_mla_rope_for_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    *,
    position_ids: Tensor | None = None,
    inverse: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Returns ``t`` with its last ``emb_dim`` columns rotated by position, in fresh memory; ``t`` is not modified.

    Args:
        t: [S, B, A, qk_head_dim + emb_dim], or [T, A, ...] for packed documents; any strides.
        cos, sin: [rows, emb_dim/2], preferably float32; or Megatron's [rows, 1, 1, emb_dim], which holds each angle
            twice, in both halves (checked on the CPU). With ``rotary_interleaved`` the copies may also be adjacent;
            which is the case is determined from the values on the CPU, and on other devices only [rows, emb_dim/2] is
            accepted. They are not differentiable, and must not require a gradient.
        qk_head_dim, emb_dim: number of columns that are not rotated, and of those that are.
        cu_seqlens_q: int32 or int64 [N+1], boundaries of the packed documents, which determine positions in [T, ...].
        cp_rank, cp_size: for context parallelism, see ``positions_from_cu_seqlens``; with ``cu_seqlens_q`` only.
        rotary_interleaved: pairs are written where they were read, to 2i and 2i + 1.
        position_ids: int32 or int64 [S], [S, B] or [T], rows of the tables, instead of ``cu_seqlens_q``; can be
            computed once for all layers. With neither, token s uses row s.
        inverse: undoes the rotation, so it reads the layout that the rotation writes. Megatron's newer functions use
            the name for something else, with the same layout in both directions: see ``fused_mla_rope_out_of_place``.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: packed tokens without positions, positions given twice, settings that have no effect, or a table of
            unknown layout.
        BackendError: ``backend`` cannot run on ``t``.
    """
    _check_queries(t, cos, sin, qk_head_dim, emb_dim)
    given = Positions(position_ids, cu_seqlens_q, cp_rank, cp_size)
    table = mla_tables(t, cos, sin, emb_dim, given, rotary_interleaved)
    return _rotated(t, table, Rotation(_layout(rotary_interleaved), inverse, offset=qk_head_dim), backend)


def fused_apply_mla_rope_for_kv(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    *,
    position_ids: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns keys [..., A, k_dim + emb_dim], ending with the rotated ``k_pos_emb``, and values [..., A, v_dim].

    Args:
        kv: [S, B, A, k_dim + v_dim], or [T, A, ...] for packed documents; any strides.
        k_pos_emb: [S, B, 1, emb_dim] or [T, 1, emb_dim], in the dtype of ``kv``; shared by all heads.

    The other arguments and errors are those of ``fused_apply_mla_rope_for_q``. The gradient of ``k_pos_emb`` is summed
    over the heads in float32 and in a fixed order.
    """
    _check_keys_and_values(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim)
    given = Positions(position_ids, cu_seqlens_kv, cp_rank, cp_size)
    table = mla_tables(kv, cos, sin, emb_dim, given, rotary_interleaved)
    return _keys_and_values(kv, k_pos_emb, table, k_dim, _layout(rotary_interleaved), backend)


def fused_mla_rope_out_of_place(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Returns ``t`` [..., A, nope_dim + emb_dim] with its last ``emb_dim`` columns rotated, in fresh memory.

    Pairs are read from 2i and 2i + 1. Arguments not listed here are those of ``fused_apply_mla_rope_for_q``.

    Args:
        nope_dim, emb_dim: number of columns that are not rotated, and of those that are.
        rotary_interleaved: must be False, as in Megatron.
        inverse: rotates by the opposite angles, with the same input and output layout.
        remove_interleaving: pairs are written where they were read, to 2i and 2i + 1, instead of to i and i +
            emb_dim/2. To invert it, use ``inverse`` together with ``remove_interleaving``.
        position_ids: rows of the tables; takes precedence over ``cu_seqlens_q``, ``cp_rank`` and ``cp_size``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: ``rotary_interleaved``, or packed tokens without positions.
        BackendError: ``backend`` cannot run on ``t``.
    """
    check_floating(t=t, cos=cos, sin=sin)
    check_heads("t", t, {"nope_dim": nope_dim, "emb_dim": emb_dim}, emb_dim)
    _refuse_interleaved_tables(rotary_interleaved)
    given = _first_of(position_ids, cu_seqlens_q, cp_rank, cp_size)
    table = _of_direction(mla_tables(t, cos, sin, emb_dim, given, False), inverse)
    return _rotated(t, table, Rotation(_layout(remove_interleaving), offset=nope_dim), backend)


def fused_mla_rope_inplace(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Writes the result of ``fused_mla_rope_out_of_place`` to the last ``emb_dim`` columns of ``t``; returns ``t``.

    It needs temporary memory for those columns. autograd tracks the write: torch rejects a leaf that requires a
    gradient, and if another operation has saved ``t``, its backward raises.
    """
    check_floating(t=t, cos=cos, sin=sin)
    check_heads("t", t, {"nope_dim": nope_dim, "emb_dim": emb_dim}, emb_dim)
    _refuse_interleaved_tables(rotary_interleaved)
    given = _first_of(position_ids, cu_seqlens_q, cp_rank, cp_size)
    table = _of_direction(mla_tables(t, cos, sin, emb_dim, given, False), inverse)
    pe = t.narrow(-1, nope_dim, emb_dim)
    pe.copy_(_rotated(pe, table, Rotation(_layout(remove_interleaving)), backend))
    return t


def fused_mla_rope_kv_split(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    remove_interleaving: bool = False,
    *,
    position_ids: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns keys and values like ``fused_apply_mla_rope_for_kv``, from the same arguments.

    With ``remove_interleaving`` pairs are written where they were read. ``rotary_interleaved`` must be False, and
    ``position_ids`` takes precedence over ``cu_seqlens_kv``, as in ``fused_mla_rope_out_of_place``, with the same
    errors.
    """
    _check_keys_and_values(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim)
    _refuse_interleaved_tables(rotary_interleaved)
    given = _first_of(position_ids, cu_seqlens_kv, cp_rank, cp_size)
    table = mla_tables(kv, cos, sin, emb_dim, given, False)
    return _keys_and_values(kv, k_pos_emb, table, k_dim, _layout(remove_interleaving), backend)


class ApplyMLARotaryEmbQ(torch.autograd.Function):
    """``apply`` is ``fused_apply_mla_rope_for_q`` with positional arguments."""

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        cos: Tensor,
        sin: Tensor,
        qk_head_dim: int,
        emb_dim: int,
        cu_seqlens_q: Tensor | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        rotary_interleaved: bool = False,
    ) -> Tensor:
        _check_queries(q, cos, sin, qk_head_dim, emb_dim)
        given = Positions(None, cu_seqlens_q, cp_rank, cp_size)
        table = mla_tables(q, cos, sin, emb_dim, given, rotary_interleaved)
        how = Rotation(_layout(rotary_interleaved), offset=qk_head_dim)
        ctx.backend, ctx.options = ROPE.choose_for_function(q), how
        ctx.save_for_backward(*table)
        return not_a_view(_rotated(q, table, how, ctx.backend))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, *tuple[None, ...]]:
        back = Rotation(*ctx.options)._replace(inverse=True)
        return _rotated(grad, Tables(*ctx.saved_tensors), back, ctx.backend), *[None] * 8


class ApplyMLARotaryEmbKV(torch.autograd.Function):
    """``apply`` is ``fused_apply_mla_rope_for_kv`` with positional arguments."""

    @staticmethod
    def forward(
        ctx: Context,
        kv: Tensor,
        k_pos_emb: Tensor,
        cos: Tensor,
        sin: Tensor,
        emb_dim: int,
        k_dim: int,
        v_dim: int,
        cu_seqlens_kv: Tensor | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        rotary_interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        _check_keys_and_values(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim)
        given = Positions(None, cu_seqlens_kv, cp_rank, cp_size)
        table = mla_tables(kv, cos, sin, emb_dim, given, rotary_interleaved)
        ctx.backend, ctx.options = FUSION.choose_for_function(kv), (_layout(rotary_interleaved),)
        ctx.save_for_backward(*table)
        k, v = _keys_and_values(kv, k_pos_emb, table, k_dim, *ctx.options, ctx.backend)
        return not_a_view(k), not_a_view(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, *tuple[None, ...]]:
        dkv, dk_pe = FUSION.backs[ctx.backend](_in_batch(dk), _in_batch(dv), *ctx.saved_tensors, *ctx.options)
        shape = (*dk.shape[:-1], dkv.shape[-1]), (*dk.shape[:-2], 1, dk_pe.shape[-1])
        return dkv.view(shape[0]), dk_pe.view(shape[1]), *[None] * 9


def _check_queries(t: Tensor, cos: Tensor, sin: Tensor, qk_head_dim: int, emb_dim: int) -> None:
    check_floating(t=t, cos=cos, sin=sin)
    check_heads("t", t, {"qk_head_dim": qk_head_dim, "emb_dim": emb_dim}, emb_dim)


def _refuse_interleaved_tables(rotary_interleaved: bool) -> None:
    if rotary_interleaved:
        raise ConfigError(
            "rotary_interleaved=True is not supported here, as in Megatron; to write pairs where they were read, use "
            "remove_interleaving=True; for tables with each angle in adjacent columns, use fused_apply_mla_rope_for_q "
            "and fused_apply_mla_rope_for_kv"
        )


def _first_of(position_ids: Tensor | None, cu_seqlens: Tensor | None, cp_rank: int, cp_size: int) -> Positions:
    """``position_ids`` if given, else what determines them; Megatron's callers pass both."""
    return Positions(None, cu_seqlens, cp_rank, cp_size) if position_ids is None else Positions(position_ids)


def _of_direction(table: Tables, inverse: bool) -> Tables:
    return table._replace(sin=-table.sin) if inverse else table


def _rotated(t: Tensor, table: Tables, how: Rotation, backend: Backend | None) -> Tensor:
    y, *_ = ROPE.path(t, backend)(_in_batch(t), None, *table, None, None, *how)
    return in_shape(y, t.shape)


def _check_keys_and_values(
    kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, emb_dim: int, k_dim: int, v_dim: int
) -> None:
    check_floating(kv=kv, k_pos_emb=k_pos_emb, cos=cos, sin=sin)
    check_heads("kv", kv, {"k_dim": k_dim, "v_dim": v_dim}, emb_dim)
    check_shape("k_pos_emb", k_pos_emb, (*kv.shape[:-2], 1, emb_dim), f"one for each token of kv {list(kv.shape)}")
    if k_pos_emb.dtype != kv.dtype:
        raise ShapeError(
            f"k_pos_emb must be {kv.dtype}, like kv, because both are parts of a key; got {k_pos_emb.dtype}"
        )
    check_one_device(kv=kv, k_pos_emb=k_pos_emb)


def _keys_and_values(
    kv: Tensor, k_pos_emb: Tensor, table: Tables, k_dim: int, layout: str, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    shared = _in_batch(k_pos_emb).squeeze(2)  # [S, B, R]
    k, v = FUSION.path(kv, backend)(_in_batch(kv), shared, *table, k_dim, layout)
    return in_shape(k, (*kv.shape[:-1], k.shape[-1])), in_shape(v, (*kv.shape[:-1], v.shape[-1]))


def _in_batch(x: Tensor) -> Tensor:
    """``x`` as [S, B, A, ...]; packed tokens [T, A, ...] become a micro-batch of one."""
    return x if x.dim() == 4 else x.unsqueeze(1)


KeysAndValues = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, str], tuple[Tensor, Tensor]]


def _triton(
    kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, k_dim: int, layout: str
) -> tuple[Tensor, Tensor]:
    from megalith.fusions.rope.kernels.mla_rope import op

    return op(kv, k_pe, cos, sin, positions, k_dim, layout)


def _triton_back(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str
) -> tuple[Tensor, Tensor]:
    from megalith.fusions.rope.kernels.mla_rope import op

    return op.back(dk, dv, cos, sin, positions, layout)


_PATHS: Mapping[Backend, KeysAndValues] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
_BACKS: Mapping[Backend, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _triton_back,
    "compile": compiled.back,
    "blocked": blocked.back,
    "reference": reference_back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("compile", "blocked")}
FUSION = registered(Fusion("mla_rope_kv", _PATHS, defaults=_DEFAULTS, backs=_BACKS))


def _layout(rotary_interleaved: bool) -> str:
    return "interleaved" if rotary_interleaved else "deepseek"
