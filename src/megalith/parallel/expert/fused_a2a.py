"""Fused dispatch and combine: each token is sent once to every rank that holds one of its experts.

A plain all-to-all of rows sends a token once per expert. DeepEP's kernels send it once per rank, however many of its
experts are there, and sum the results on the way back. They compute

    dispatch   x [T, D], experts [T, K], weights [T, K]  ->  x' [R, D], experts' [R, K], weights' [R, K]
    combine    y' [R, D]  ->  y [T, D]: y[t] = sum of y'[r] over the rows r that t was sent as

for the R tokens that have an expert on this rank. experts' are indices from this rank's first expert, and -1 stands for
an expert on another rank. Each operation is the gradient of the other. The interface is that of class ``Buffer`` of
DeepEP, github.com/deepseek-ai/DeepEP.
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
    """The methods of DeepEP's ``Buffer`` that are called here."""

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        """Returns tokens per rank, per node and per expert, whether each token goes to each rank, and an event."""

    def dispatch(self, x: Tensor, **how: Any) -> tuple[Tensor, Tensor | None, Tensor | None, list[int], Any, Any]:
        """Returns x', experts', weights', tokens per expert of this rank, a handle for ``combine``, and an event."""

    def combine(self, x: Tensor, handle: Any, **how: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Returns y, combined weights, and an event."""


@dataclass
class FusedA2A:
    """The ranks that exchange tokens, and their buffer, which all layers of a model share."""

    group: ProcessGroup
    buffer: A2ABuffer


@dataclass(eq=False)
class Received:
    """The result of ``fused_dispatch``.

    Attributes:
        tokens: [R, D].
        experts: int64 [R, K], local expert indices from 0; -1 for an expert on another rank.
        weights: float32 [R, K].
        tokens_per_expert: how many tokens each expert of this rank has.
        handle: the routes of the tokens, which ``fused_combine`` needs.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    tokens_per_expert: list[int] = field(default_factory=list)
    handle: Any = None


def deep_ep_buffer(group: ProcessGroup, hidden_bytes: int) -> A2ABuffer:
    """Creates a DeepEP buffer over ``group`` for tokens of ``hidden_bytes``.

    Raises MissingDependencyError if DeepEP is not installed.
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

    The host synchronizes with the device to learn how many tokens arrive. A collective over the group.
    """
    received = Received(tokens, experts, weights)
    received.tokens, received.weights = _Dispatch.apply(tokens, weights, experts, num_experts, a2a.buffer, received)
    return received


def fused_combine(a2a: FusedA2A, rows: Tensor, received: Received) -> Tensor:
    """Sends ``rows`` [R, D], computed from ``received.tokens``, back to their ranks, and returns the sums [T, D]."""
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
