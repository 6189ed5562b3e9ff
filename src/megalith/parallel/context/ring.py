"""Ring attention: keys and values travel from rank to rank, and each rank computes with those that it currently holds.

After cp steps every rank has seen all keys. The backward sends keys and values around the ring again together with
their gradients, to which each rank adds its terms, until the gradients are back on their own rank. Communication
overlaps with computation.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.fusions import sink_correction
from megalith.fusions.attention.formulas import sink_gradient
from megalith.parallel.context.partial_attention import PartialAttention
from megalith.topology.inbox import Inbox

__all__ = ["Ring", "ring_attention"]


@dataclass(frozen=True)
class Ring:
    """A ring of ``size`` ranks of ``group``, with this rank at ``index`` and its neighbours ``stride`` ranks away.

    ``stride`` is above 1 if that many adjacent ranks share one part of the sequence. Without a ``group`` the ring is
    this rank alone.
    """

    group: ProcessGroup | None
    stride: int = 1

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size() // self.stride

    @property
    def index(self) -> int:
        return 0 if self.group is None else self.group.rank() // self.stride

    def pass_on(self, *tensors: Tensor) -> "_Arriving":
        """Starts sending ``tensors`` to the next rank and receiving tensors of the same shapes from the previous one.

        ``tensors`` must not be changed before ``wait`` has returned.
        """
        assert self.group is not None, "a single rank has no group to send in"
        W, rank = self.group.size(), self.group.rank()
        sent = [tensor.contiguous() for tensor in tensors]
        received = [Inbox.like(tensor) for tensor in sent]
        after, before = (rank + self.stride) % W, (rank - self.stride) % W
        sends = [dist.P2POp(dist.isend, x, group=self.group, group_peer=after) for x in sent]
        receives = [dist.P2POp(dist.irecv, x.landing, group=self.group, group_peer=before) for x in received]
        return _Arriving(received, sent, dist.batch_isend_irecv(sends + receives))


@dataclass(frozen=True)
class _Arriving:
    """Tensors being received; ``sent`` keeps the tensors being sent alive."""

    received: list[Inbox]
    sent: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return [inbox.opened() for inbox in self.received]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    attention: PartialAttention,
    ring: Ring,
    key_spans: list[list[range]],
    by_distance: Tensor | None = None,
) -> Tensor:
    """Computes attention of this rank's queries over the keys of all ranks of ``ring``.

    Args:
        q: [Sq, B, A, D], at the positions of ``attention.spans``.
        k, v: [Sk, B, G, D] and [Sk, B, G, Dv], this rank's.
        sink: [A], counted once, after the keys of all ranks.
        attention: the positions of the queries, and what they see.
        ring: the ranks that hold the keys.
        key_spans: the positions of each rank's keys.
        by_distance: [A, 2S - 1], added to the scores as described in ``relative_bias``.

    Returns:
        [Sq, B, A, Dv] in the dtype of ``q``; merged in float32 or wider and rounded once.
    """
    out: Tensor = _RingAttention.apply(q, k, v, sink, by_distance, attention, ring, key_spans)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        by_distance: Tensor | None,
        attention: PartialAttention,
        ring: Ring,
        key_spans: list[list[range]],
    ) -> Tensor:
        attention = replace(attention, by_distance=by_distance)
        (Sq, B, A, _), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(Sq, B, A, v.shape[-1], dtype=wide)
        lse = q.new_full((B, A, Sq), -torch.inf, dtype=wide)
        here_k, here_v = k, v
        for step in range(ring.size):
            is_last = step + 1 == ring.size
            arriving = None if is_last else ring.pass_on(here_k, here_v)
            attention.add_(out, lse, q, here_k, here_v, key_spans[(ring.index - step) % ring.size])
            if arriving is not None:
                here_k, here_v = arriving.wait()
        if sink is not None:
            out, lse = sink_correction(out, lse, sink)
        out = out.to(q.dtype)
        ctx.attention, ctx.ring, ctx.key_spans = replace(attention, by_distance=None), ring, key_spans
        ctx.save_for_backward(q, k, v, sink, by_distance, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, by_distance, out, lse = ctx.saved_tensors
        dby_distance = None if by_distance is None else torch.zeros_like(by_distance, dtype=lse.dtype)
        attention = replace(ctx.attention, by_distance=by_distance, dby_distance=dby_distance)
        ring = ctx.ring
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        here_k, here_v = k, v
        on_their_way: _Arriving | None = None  # dk and dv of the next keys, with the terms of the previous ranks
        for step in range(ring.size):
            is_last = step + 1 == ring.size
            arriving = None if is_last else ring.pass_on(here_k, here_v)
            if step > 0:
                dk, dv = torch.zeros_like(dk), torch.zeros_like(dv)
            spans = ctx.key_spans[(ring.index - step) % ring.size]
            attention.add_gradients_((dq, dk, dv), dout, q, (here_k, here_v), (out, lse), spans)
            if on_their_way is not None:
                dk, dv = (ours + theirs for ours, theirs in zip((dk, dv), on_their_way.wait(), strict=True))
            if ring.size > 1:
                on_their_way = ring.pass_on(dk, dv)
            if arriving is not None:
                here_k, here_v = arriving.wait()
        if on_their_way is not None:
            dk, dv = on_their_way.wait()  # those of this rank's own keys
        dsink = sink_gradient(dout, None, out, lse, sink) if ctx.needs_input_grad[3] else None
        if dby_distance is not None:
            dby_distance = dby_distance.to(by_distance.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, dby_distance, None, None, None
