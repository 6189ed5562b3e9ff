"""Formulas for the keys and values of ``mla_rope``, stated there.

S sequence, B micro-batch, A heads; columns of a head: K not rotated, R rotated, V of the value.
"""

import torch
from torch import Tensor

from megalith.fusions.core.blocks import by_blocks
from megalith.fusions.core.compiled_formulas import CompiledFormula
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.rows import wide
from megalith.fusions.rope.rotation import Rotation, Tables, rotate

__all__ = ["OPERATOR", "blocked", "compiled", "gradients", "outputs", "reference", "reference_back"]


def reference(
    kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, k_dim: int, layout: str
) -> tuple[Tensor, Tensor]:
    """k [S, B, A, K + R] and v [S, B, A, V], from ``kv`` [S, B, A, K + V], ``k_pe`` [S, B, R] and ``Tables``."""
    rotated = rotate(k_pe.unsqueeze(2), Tables(cos, sin, positions), Rotation(layout), kv.dtype)  # [S, B, 1, R]
    k = torch.cat((kv[..., :k_dim], rotated.expand(*kv.shape[:-1], -1)), dim=-1)
    return k, kv[..., k_dim:].clone(memory_format=torch.contiguous_format)


def outputs(
    kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, k_dim: int, layout: str
) -> tuple[Tensor, Tensor]:
    """Allocates k [S, B, A, K + R] and v [S, B, A, V]."""
    heads = kv.shape[:-1]
    return kv.new_empty(*heads, k_dim + k_pe.shape[-1]), kv.new_empty(*heads, kv.shape[-1] - k_dim)


def gradients(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str
) -> tuple[Tensor, Tensor]:
    """Allocates dkv [S, B, A, K + V] and dk_pe [S, B, R]."""
    R = 2 * cos.shape[-1]
    return dk.new_empty(*dk.shape[:-1], dk.shape[-1] - R + dv.shape[-1]), dk.new_empty(*dk.shape[:2], R)


def _saves(
    _: tuple[Tensor, ...],
    kv: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    k_dim: int,
    layout: str,
) -> tuple[object, ...]:
    """What backward gets besides the gradients: the tables and the layout."""
    return cos, sin, positions, layout


OPERATOR = Operator(outputs, gradients, of=("kv", "k_pe"), saves=_saves, num_differentiable=2)


def _backward(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str
) -> tuple[Tensor, Tensor]:
    table, R = Tables(cos, sin, positions), 2 * cos.shape[-1]
    nope, pe = dk.split((dk.shape[-1] - R, R), dim=-1)
    dk_pe = dk.new_empty(*dk.shape[:2], 1, R)

    def summed_and_rotated_back(pe: Tensor, *rows: Tensor) -> tuple[Tensor]:
        shared = pe.sum(dim=2, keepdim=True, dtype=wide(pe.dtype))
        return (rotate(shared, table.block(*rows), Rotation(layout, inverse=True)),)

    by_blocks(summed_and_rotated_back, (pe, *table.rows()), (dk_pe,))
    return torch.cat((nope, dv), dim=-1), dk_pe.squeeze(2)


def reference_back(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str
) -> tuple[Tensor, Tensor]:
    """dkv [S, B, A, K + V] and dk_pe [S, B, R]."""
    R = 2 * cos.shape[-1]
    nope, pe = dk.split((dk.shape[-1] - R, R), dim=-1)
    shared = pe.sum(dim=2, keepdim=True, dtype=wide(pe.dtype))
    dk_pe = rotate(shared, Tables(cos, sin, positions), Rotation(layout, inverse=True), dk.dtype)
    return torch.cat((nope, dv), dim=-1), dk_pe.squeeze(2)


# forward copies each column once, to its final place, so blocks would not help
blocked = OPERATOR.register("mla_rope_kv_blocked", reference, _backward, opaque=True)
compiled = OPERATOR.register(
    "mla_rope_kv_compiled",
    CompiledFormula(reference, shares_vectors=True),
    CompiledFormula(reference_back, shares_vectors=True),
    opaque=True,
)
