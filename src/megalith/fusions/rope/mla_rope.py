"""Rotary positions of multi-latent attention: the last columns of each query, and of one key that all heads share.

    q' = [q_nope | turn(q_pe)]
    k  = [kv_nope | turn(k_pe)] for each head, v = the rest of kv
    dkv = [dk_nope | dv],  dk_pe = turn back (sum over A of the last columns of dk)

DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434; tables usually those of YaRN (``yarn_cos_sin``), arXiv:2309.00071.
A pair of the ``emb_dim`` features is 2i and 2i + 1 in what is read, i and i + emb_dim/2 in what is written.

S sequence, B micro-batch, A heads, T packed tokens; columns of a head: K = qk_head_dim = k_dim, R = emb_dim, V = v_dim.
Saved for backward: the tables and positions alone.
Floor: q forward and backward 2SBA(K + R) elements each; kv forward and backward SBA(2K + 2V + R) + SBR.
Keys and values are written once, where attention reads them: no split, no expansion of k_pe, no concatenation.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import in_shape
from megalith.fusions.rope.mla_formulas import blocked, compiled, reference
from megalith.fusions.rope.rope import FUSION as ROPE
from megalith.fusions.rope.rotation import Rotation, Tables, tables
from megalith.fusions.rope.tables import positions_from_cu_seqlens

__all__ = [
    "FUSION",
    "ApplyMLARotaryEmbKV",
    "ApplyMLARotaryEmbQ",
    "fused_apply_mla_rope_for_kv",
    "fused_apply_mla_rope_for_q",
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
    """Queries whose last ``emb_dim`` columns are turned by their positions, in fresh memory: ``t`` stays as it is.

    Args:
        t: [S, B, A, qk_head_dim + emb_dim], or [T, A, ...] of packed documents; any strides.
        cos, sin: [rows, emb_dim/2], best in float32; or the field's [rows, 1, 1, emb_dim], in which each angle stands
            twice, in both halves. With ``rotary_interleaved`` the angles may also stand side by side; which it is, is
            read from a table on the CPU, and elsewhere [rows, emb_dim/2] must be given.
        qk_head_dim, emb_dim: columns that stay, then columns that turn.
        cu_seqlens_q: int32 or int64 [N+1], borders of the packed documents, which say the positions of [T, ...].
        cp_rank, cp_size: of context parallelism, see ``positions_from_cu_seqlens``; with ``cu_seqlens_q`` only.
        rotary_interleaved: pairs are written as they are read, 2i and 2i + 1.
        position_ids: int32 or int64 [S], [S, B] or [T], rows of the tables, in place of ``cu_seqlens_q``; computed
            once, they serve all layers. With neither, token s takes row s.
        inverse: turns back: reads what the other writes.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: packed tokens of unknown positions, or positions given twice, or settings that have no effect; a
            table of unknown layout.
        BackendError: ``backend`` cannot run on ``t``.
    """
    check_floating(t=t, cos=cos, sin=sin)
    _check_heads("t", t, {"qk_head_dim": qk_head_dim, "emb_dim": emb_dim}, emb_dim)
    heads = t if t.dim() == 4 else t.unsqueeze(1)
    table = _tables(t, cos, sin, emb_dim, position_ids, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved)
    compute = ROPE.path(t, backend)
    how = Rotation(_layout(rotary_interleaved), inverse, offset=qk_head_dim)
    return in_shape(compute(heads, None, *table, None, None, *how)[0], t.shape)


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
    """Keys [..., A, k_dim + emb_dim], whose last columns are ``k_pos_emb``, turned; and values [..., A, v_dim].

    Args:
        kv: [S, B, A, k_dim + v_dim], or [T, A, ...] of packed documents; any strides.
        k_pos_emb: [S, B, 1, emb_dim] or [T, 1, emb_dim], in the dtype of ``kv``; all heads share it.

    The other arguments, and what is raised, are those of ``fused_apply_mla_rope_for_q``. The gradient of ``k_pos_emb``
    is summed over the heads in float32 and in one order.
    """
    check_floating(kv=kv, k_pos_emb=k_pos_emb, cos=cos, sin=sin)
    _check_heads("kv", kv, {"k_dim": k_dim, "v_dim": v_dim}, emb_dim)
    check_shape("k_pos_emb", k_pos_emb, (*kv.shape[:-2], 1, emb_dim), f"one for each token of kv {list(kv.shape)}")
    if k_pos_emb.dtype != kv.dtype:
        raise ShapeError(f"k_pos_emb must be {kv.dtype}, as kv: both are parts of a key; got {k_pos_emb.dtype}")
    check_one_device(kv=kv, k_pos_emb=k_pos_emb)
    heads, shared = (kv, k_pos_emb) if kv.dim() == 4 else (kv.unsqueeze(1), k_pos_emb.unsqueeze(1))
    table = _tables(kv, cos, sin, emb_dim, position_ids, cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved)
    k, v = FUSION.path(kv, backend)(heads, shared.squeeze(2), *table, k_dim, _layout(rotary_interleaved))
    return in_shape(k, (*kv.shape[:-1], k_dim + emb_dim)), in_shape(v, (*kv.shape[:-1], v_dim))


class ApplyMLARotaryEmbQ:
    """``apply`` is ``fused_apply_mla_rope_for_q``, under the name that the field knows."""

    apply = staticmethod(fused_apply_mla_rope_for_q)


class ApplyMLARotaryEmbKV:
    """``apply`` is ``fused_apply_mla_rope_for_kv``, under the name that the field knows."""

    apply = staticmethod(fused_apply_mla_rope_for_kv)


KeysAndValues = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, str], tuple[Tensor, Tensor]]


def _triton(*inputs: Any) -> tuple[Tensor, Tensor]:
    from megalith.fusions.rope.kernels.mla_rope import op

    return op(*inputs)


_PATHS: Mapping[Backend, KeysAndValues] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("mla_rope_kv", _PATHS, defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")}))


def _layout(rotary_interleaved: bool) -> str:
    return "interleaved" if rotary_interleaved else "deepseek"


def _check_heads(name: str, x: Tensor, columns: Mapping[str, int], emb_dim: int) -> None:
    """Refuses heads of other columns than those named, and an ``emb_dim`` whose features do not pair up."""
    if emb_dim % 2 or min(emb_dim, *columns.values()) <= 0:
        given = ", ".join(f"{key}={value}" for key, value in ({"emb_dim": emb_dim} | dict(columns)).items())
        raise ShapeError(f"columns must be positive, and emb_dim even, as features turn in pairs; got {given}")
    D = sum(columns.values())
    if x.dim() not in (3, 4) or x.shape[-1] != D:
        wanted = " + ".join(columns)
        raise ShapeError(f"{name} must be [S, B, A, {D}] or [T, A, {D}], {wanted} columns; got {list(x.shape)}")


def _tables(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    rotary_interleaved: bool,
) -> Tables:
    check_one_device(**{"the heads": x, "cos": cos, "sin": sin, "position_ids": position_ids, "cu_seqlens": cu_seqlens})
    if cu_seqlens is None and (cp_rank, cp_size) != (0, 1):
        raise ConfigError(
            "cp_rank and cp_size say where documents are cut; without cu_seqlens give the position_ids of this rank"
        )
    if cu_seqlens is not None and (position_ids is not None or x.dim() == 4):
        raise ConfigError("cu_seqlens says the positions of packed tokens [T, A, ...]; elsewhere give position_ids")
    if cu_seqlens is None and position_ids is None and x.dim() == 3:
        raise ConfigError("the positions of packed tokens [T, A, ...] are not known; give cu_seqlens or position_ids")
    if cu_seqlens is not None:
        position_ids = positions_from_cu_seqlens(cu_seqlens, len(x), cp_rank, cp_size)
    cos, sin = (_half(table, emb_dim, rotary_interleaved) for table in (cos, sin))
    return tables(cos, sin, position_ids, x.shape[0], x.shape[1] if x.dim() == 4 else 1, emb_dim)


def _half(table: Tensor, emb_dim: int, rotary_interleaved: bool) -> Tensor:
    """[rows, R/2] of a table that holds each angle twice, [rows, 1, 1, R]; others as they are."""
    if table.dim() != 4:
        return table
    check_shape("cos and sin", table, (len(table), 1, 1, emb_dim), "rows of emb_dim, or [rows, emb_dim/2]")
    rows = table[:, 0, 0]
    first_half, even = rows[:, : emb_dim // 2], rows[:, ::2]
    if not rotary_interleaved:
        return first_half
    # Megatron's RotaryEmbedding puts the angles side by side then, and its YarnRotaryEmbedding in both halves
    if table.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(table, FakeTensor):
        raise ConfigError(
            f"with rotary_interleaved the angles of a table [rows, 1, 1, {emb_dim}] stand side by side or in both "
            f"halves, and the host would have to wait for the device to see it; give [rows, {emb_dim // 2}]: "
            f"cos[:, 0, 0, ::2] if side by side, cos[:, 0, 0, :{emb_dim // 2}] if in both halves, as those of YaRN"
        )
    if torch.equal(even, rows[:, 1::2]):
        return even
    if torch.equal(first_half, rows[:, emb_dim // 2 :]):
        return first_half
    raise ConfigError(
        f"a table [rows, 1, 1, {emb_dim}] must hold each angle twice, side by side or in both halves; this one does "
        f"not; give [rows, {emb_dim // 2}], a column for each pair"
    )
