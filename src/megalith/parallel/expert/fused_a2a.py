"""Fused dispatch and combine: each token travels once to every rank that holds one of its experts, and sums come back.

An all-to-all of rows sends a token as often as it has experts. DeepEP's kernels send it once to each rank, whatever the
number of its experts there, and add up on the way back. What they compute is

    dispatch   x [T, D], experts [T, K], weights [T, K]  ->  x' [R, D], experts' [R, K], weights' [R, K]
    combine    y' [R, D]  ->  y [T, D]: y[t] = sum of y'[r] over the rows r that t was sent as

for the R tokens that have an expert here; experts' counts from this rank's first one, and -1 marks one elsewhere. Each
is the gradient of the other. DeepEP: github.com/deepseek-ai/DeepEP, the interface of its class ``Buffer``.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megalith.optional import need

__all__ = ["A2ABuffer", "FusedA2A", "Received", "deep_ep_buffer", "fused_combine", "fused_dispatch"]


class A2ABuffer(Protocol):
    """What is called of DeepEP's ``Buffer``."""

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        """Tokens per rank, per node, per expert, whether each token goes to each rank, and an event."""

    def dispatch(self, x: Tensor, **how: Any) -> tuple[Tensor, Tensor | None, Tensor | None, list[int], Any, Any]:
        """x', experts', weights', tokens per expert of this rank, a handle of the way, and an event."""

    def combine(self, x: Tensor, handle: Any, **how: Any) -> tuple[Tensor, Tensor | None, Any]:
        """y, combined weights, and an event."""


@dataclass
class FusedA2A:
    """The ranks that exchange tokens, and the buffer that they do it through, which all layers of a model share."""

    group: ProcessGroup
    buffer: A2ABuffer


@dataclass(eq=False)
class Received:
    """What ``fused_dispatch`` gives.

    Attributes:
        tokens: [R, D].
        experts: int64 [R, K], of this rank, from 0; -1 where an expert of the token is on another rank.
        weights: float32 [R, K].
        tokens_per_expert: how many of them each expert of this rank has.
        handle: the way that they came.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    tokens_per_expert: list[int] = field(default_factory=list)
    handle: Any = None


def deep_ep_buffer(group: ProcessGroup, hidden_bytes: int) -> A2ABuffer:
    """A buffer of DeepEP over ``group`` for tokens of ``hidden_bytes``.

    Raises MissingDependencyError where DeepEP is not installed.
    """
    Buffer = need("deep_ep").Buffer
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
        num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(hidden_bytes, group.size()))
        num_rdma_bytes = max(num_rdma_bytes, config.get_rdma_buffer_size_hint(hidden_bytes, group.size()))
    buffer: A2ABuffer = Buffer(group, num_nvl_bytes, num_rdma_bytes)
    return buffer


def fused_dispatch(a2a: FusedA2A, tokens: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Received:
    """Sends tokens [T, D] to the ranks of their ``experts``, int64 [T, K], -1 for none, with ``weights`` [T, K].

    The host waits for the device, to know how many tokens arrive. All ranks of the group call it.
    """
    received = Received(tokens, experts, weights)
    received.tokens, received.weights = _Dispatch.apply(tokens, weights, experts, num_experts, a2a.buffer, received)
    return received


def fused_combine(a2a: FusedA2A, rows: Tensor, received: Received) -> Tensor:
    """The sums [T, D], of what was made of the tokens of ``received``, [R, D], at the ranks that they came from."""
    y: Tensor = _Combine.apply(rows, a2a.buffer, received.handle)
    return y


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        experts: Tensor,
        num_experts: int,
        buffer: A2ABuffer,
        received: Received,
    ) -> tuple[Tensor, Tensor]:
        per_rank, per_node, per_expert, goes_to_rank, _ = buffer.get_dispatch_layout(experts, num_experts)
        rows, local_experts, local_weights, counts, handle, _ = buffer.dispatch(
            tokens.contiguous(),
            topk_idx=experts,
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_to_rank,
            num_tokens_per_expert=per_expert,
        )
        assert local_experts is not None, "experts were given"
        assert local_weights is not None, "weights were given"
        received.experts, received.tokens_per_expert, received.handle = local_experts, counts, handle
        ctx.buffer, ctx.handle = buffer, handle
        return rows, local_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dweights: Tensor) -> tuple[Tensor | None, ...]:
        dtokens, dw, _ = ctx.buffer.combine(drows.contiguous(), ctx.handle, topk_weights=dweights.contiguous())
        return dtokens, dw, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: A2ABuffer, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(dy.contiguous(), handle=ctx.handle)[0], None, None
