"""What attention over a split sequence exchanges, by the method that a run chooses.

With n = cp, q for [S/cp, B, A/tp, D] and kv for [S/cp, B, G/tp, D], in bytes; kv32 for kv in float32 or wider:

    ring         forward  2 (n - 1) sends of kv
                 backward 2 (n - 1) sends of kv, 2 n of kv32: gradients travel once more, back to where they belong
    all_gather   forward  2 all-gathers of n kv;  backward 2 reduce-scatters of n kv
    all_to_all   forward  4 all-to-alls, of q, k, v and out;  backward 4, of their gradients
    two_level    all_to_all among `inner` neighbours, and a ring of n = cp / inner

Heads are traded whole, so that k and v are repeated until the ranks that trade divide their groups.
"""

from math import gcd, prod

import torch

from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.traffic import Passes, collective

__all__ = ["attention_traffic"]


def attention_traffic(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    method: ContextMethod,
    cp_size: int,
    drops: bool,
) -> Passes:
    """What ``context_attention`` exchanges over cp for q [S/cp, B, A, D], and k and v [S/cp, B, G, D].

    ``drops``: whether there is attention dropout, for which ranks that trade heads trade token ids too.
    """
    kv = prod(k_shape) * dtype.itemsize
    if method.name == "all_gather":
        gathered = collective("context", "all_gather", cp_size * kv, cp_size, times=2)
        return Passes(gathered, collective("context", "reduce_scatter", cp_size * kv, cp_size, times=2))
    inner = method.ranks_trading_heads(cp_size)
    kv *= inner // gcd(k_shape[2], inner)
    q = prod(q_shape) * dtype.itemsize
    one, two = (collective("context", "all_to_all", size, inner, times) for size, times in ((q, 1), (kv, 2)))
    token_ids = inner * q_shape[0] * q_shape[1] * torch.int64.itemsize
    ids = collective("context", "all_to_all", token_ids, inner, times=int(drops))
    for_sequence, for_heads = Passes(one + two + ids, one + two), Passes(one, one, unsaved=one)
    return for_sequence + _ring(kv, dtype, cp_size // inner) + for_heads


def _ring(kv: int, dtype: torch.dtype, size: int) -> Passes:
    wide_kv = kv // dtype.itemsize * torch.promote_types(dtype, torch.float32).itemsize
    passed_on = collective("context", "send", kv, size, times=2 * (size - 1))
    return Passes(passed_on, passed_on + collective("context", "send", wide_kv, size, times=2 * size))
