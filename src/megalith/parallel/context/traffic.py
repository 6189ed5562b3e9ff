"""What attention over a split sequence exchanges, for each method.

n = cp; q is the size in bytes of [S/cp, B, A/tp, D], kv that of [S/cp, B, G/tp, D], and kv32 that of kv in float32 or
wider. Collectives come in pairs, one for k and one for v, whose heads may have another size:

    ring         forward  2 (n - 1) sends of kv
                 backward 2 (n - 1) sends of kv, 2 n of kv32: gradients take one more step, back to their own rank
    all_gather   forward  2 all-gathers of n kv;  backward 2 reduce-scatters of n kv
    all_to_all   forward  4 all-to-alls, of q, k, v and out;  backward 4, of their gradients
    two_level    all_to_all among `inner` neighbours, and a ring of n = cp / inner

Whole heads are exchanged, so k and v are repeated until the number of ranks in the all-to-all divides their groups.
"""

from math import gcd, prod

import torch

from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.traffic import Passes, Traffic, collective

__all__ = ["attention_traffic"]


def attention_traffic(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    value_size: int,
    dtype: torch.dtype,
    method: ContextMethod,
    cp_size: int,
    drops: bool,
) -> Passes:
    """What ``context_attention`` exchanges over cp for q [S/cp, B, A, D], k [S/cp, B, G, D] and v of ``value_size``.

    ``drops``: whether there is attention dropout, for which ranks that exchange heads exchange token ids too.
    """
    q, out, k, v = (
        prod(shape[:3]) * size * dtype.itemsize
        for shape, size in ((q_shape, q_shape[3]), (q_shape, value_size), (k_shape, k_shape[3]), (k_shape, value_size))
    )
    if method.name == "all_gather":
        gathered, reduced = (
            collective("context", kind, cp_size * k, cp_size) + collective("context", kind, cp_size * v, cp_size)
            for kind in ("all_gather", "reduce_scatter")
        )
        return Passes(gathered, reduced)
    inner = method.ranks_trading_heads(cp_size)
    copies = inner // gcd(k_shape[2], inner)
    k, v = copies * k, copies * v
    given = sum((collective("context", "all_to_all", size, inner) for size in (q, k, v)), start=Traffic())
    one = collective("context", "all_to_all", out, inner)
    token_ids = inner * q_shape[0] * q_shape[1] * torch.int64.itemsize
    ids = collective("context", "all_to_all", token_ids, inner, times=int(drops))
    for_sequence, for_heads = Passes(given + ids, given), Passes(one, one, unsaved=one)
    rings = [_ring(num_bytes, dtype, cp_size // inner) for num_bytes in (k, v)]
    return for_sequence + rings[0] + rings[1] + for_heads


def _ring(num_bytes: int, dtype: torch.dtype, size: int) -> Passes:
    """What a ring of ``size`` ranks exchanges for k, or for v, of ``num_bytes``."""
    wide_bytes = num_bytes // dtype.itemsize * torch.promote_types(dtype, torch.float32).itemsize
    passed_on = collective("context", "send", num_bytes, size, times=size - 1)
    return Passes(passed_on, passed_on + collective("context", "send", wide_bytes, size, times=size))
