"""A stand-in for DeepEP's ``Buffer`` over any process group: its documented interface, by all-to-alls."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StandInBuffer:
    """Sends each token once to every rank that holds one of its experts, ordered by rank and token."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        W = self.group.size()
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts)
        rank_of = torch.where(topk_idx >= 0, topk_idx // (num_experts // W), -1)  # [T, K]
        goes = torch.stack([(rank_of == rank).any(dim=1) for rank in range(W)], dim=1)  # [T, W]
        return goes.sum(dim=0), None, per_expert, goes, None

    def dispatch(self, x: Tensor, *, handle: Any = None, **how: Any) -> tuple[Any, ...]:
        assert x.is_contiguous()
        if handle is not None:  # the routing is known: send rows only
            return self._send(x, handle), None, None, [], handle, None
        topk_idx, weights, goes = how["topk_idx"], how["topk_weights"], how["is_token_in_rank"]
        W, rank = self.group.size(), self.group.rank()
        assert weights.dtype in (torch.float32, torch.float64)
        assert torch.equal(how["num_tokens_per_rank"], goes.sum(dim=0))
        num_local = len(how["num_tokens_per_expert"]) // W
        tokens = [goes[:, to].nonzero().flatten() for to in range(W)]
        sent = torch.tensor([len(each) for each in tokens])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = (torch.cat(tokens), sent.tolist(), received.tolist(), len(x))
        experts = self._send(topk_idx, handle) - rank * num_local
        is_here = (experts >= 0) & (experts < num_local)
        experts = experts.where(is_here, -1)
        counts = torch.bincount(experts[is_here], minlength=num_local).tolist()
        local_weights = self._send(weights, handle).where(is_here, 0.0)
        return self._send(x, handle), experts, local_weights, counts, handle, None

    def combine(self, x: Tensor, handle: Any, *, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        weights = None if topk_weights is None else self._back(topk_weights, handle)
        return self._back(x, handle), weights, None

    def _send(self, x: Tensor, handle: Any) -> Tensor:
        tokens, sent, received, _ = handle
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x[tokens], received, sent, group=self.group)
        return y

    def _back(self, y: Tensor, handle: Any) -> Tensor:
        tokens, sent, received, T = handle
        rows = y.new_empty(sum(sent), *y.shape[1:])
        dist.all_to_all_single(rows, y.contiguous(), sent, received, group=self.group)
        return y.new_zeros(T, *y.shape[1:]).index_add_(0, tokens, rows)
