"""A mixture of experts in place of the MLP: route, dispatch, compute, combine.

    y_t = sum over the K experts e of token t of  w_te expert_e(x_t)   +  shared(x_t)

    latents     y_t = B sum of w_te expert_e(A x_t),  which reduces communication
    turns       if a rank's experts receive more than their share of rows, the layer is computed in several turns, each
                recomputed in backward: uneven loads then cost time instead of memory

Shazeer et al. 2017, arXiv:1701.06538; dropless as in Gale et al. 2022, "MegaBlocks", arXiv:2211.15841.
"""

from dataclasses import replace
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.acceleration.recompute import recompute
from megalith.config import TransformerConfig
from megalith.fusions import row_map
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import ReplicatedLinear
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.capacity import expert_capacity
from megalith.transformer.moe.experts import GroupedMLP
from megalith.transformer.moe.router import TopKRouter
from megalith.transformer.moe.routing import Routing
from megalith.transformer.moe.shared_experts import SharedExpertMLP
from megalith.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoESymmetricTokenDispatcher,
    MoETokenDispatcher,
)

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """The mixture of experts of the layer with global index ``layer``."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, *, layer: int) -> None:
        super().__init__()
        moe, H = config.moe, config.hidden_size
        assert moe is not None, "only built for models with model.moe"
        self.num_experts, self.groups = moe.num_experts, options.pg_collection
        self.top_k, self.capacity = moe.top_k, moe.capacity
        self.max_rows = options.dispatch.max_rows
        self.gate = TopKRouter(config, options, layer)
        self.experts = GroupedMLP(config, options)
        self.shared_experts = SharedExpertMLP(config, options) if moe.shared_ffn_hidden_size is not None else None
        self.to_latents: ReplicatedLinear | None = None
        self.from_latents: ReplicatedLinear | None = None
        if moe.latent_size is not None:
            self.to_latents = ReplicatedLinear(H, moe.latent_size, options, std=config.init_method_std)
            self.from_latents = ReplicatedLinear(moe.latent_size, H, options, std=config.init_method_std)
        self.dispatcher: MoETokenDispatcher[Any, Any] = _DISPATCHERS[options.dispatch.method](moe.num_experts, options)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]."""
        routing = self.gate(x, context, context.padding_mask)
        travels = x if self.to_latents is None else self.to_latents(x)
        tokens = travels.reshape(-1, travels.shape[-1])  # [T, D]
        if self.max_rows is not None and (num_turns := self._num_turns(routing, self.max_rows)) > 1:
            y, shared = self._in_turns(tokens, routing, num_turns), self._shared(x, context)
        else:
            sent = self.dispatcher.send(tokens, routing, self._padded_to(len(tokens)))
            shared = self._shared(x, context)  # overlaps with the dispatch
            (rows, weights, rows_per_expert), plan = self.dispatcher.receive(sent)
            y = self.dispatcher.combine(self.experts(rows, weights, rows_per_expert), plan)
        y = y.view(travels.shape)
        y = y if self.from_latents is None else self.from_latents(y)
        return y if shared is None else y + shared

    def _padded_to(self, num_tokens: int) -> int | None:
        """Returns the rows per expert that this rank sends if they are padded to the capacity, else None."""
        if self.capacity is None or not self.capacity.pad:
            return None
        return expert_capacity(num_tokens, self.top_k, self.num_experts, self.capacity.factor)

    def _shared(self, x: Tensor, context: LayerContext) -> Tensor | None:
        return None if self.shared_experts is None else self.shared_experts(x, context)

    def _routed(self, tokens: Tensor, indices: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts ``indices``, [T, D]."""
        sent = self.dispatcher.send(tokens, replace(routing, indices=indices, weights=weights))
        (rows, weights, rows_per_expert), plan = self.dispatcher.receive(sent)
        return self.dispatcher.combine(self.experts(rows, weights, rows_per_expert), plan)

    def _in_turns(self, tokens: Tensor, routing: Routing, num_turns: int) -> Tensor:
        """Sums the outputs of all turns; each turn takes an equal part of this rank's tokens of each expert."""
        found = row_map(routing.indices, routing.indices.numel(), num_experts=self.num_experts)
        counts = found.rows_per_expert.to(torch.int64)
        expert = routing.indices.clamp(max=self.num_experts - 1)  # arbitrary for dropped slots
        position = found.row_of - (counts.cumsum(0) - counts)[expert]  # [T, K], among the tokens of the expert
        turn = position * num_turns // counts[expert].clamp(min=1)
        y = torch.zeros_like(tokens)
        for number in range(num_turns):
            indices = routing.indices.where(turn == number, self.num_experts)
            y = y + recompute(self._routed, tokens, indices, routing.weights, routing)
        return y

    def _num_turns(self, routing: Routing, max_rows: float) -> int:
        """Returns how many turns limit every rank to ``max_rows`` times the rows of even loads; same on all ranks.

        Even loads are computed from the tokens of all ranks of ep and etp, whose numbers of tokens may differ.
        """
        groups = self.groups
        # the last entry counts dropped slots
        loads = torch.bincount(routing.indices.flatten().clamp(max=self.num_experts), minlength=self.num_experts + 1)
        for group in (groups.ep, groups.etp):
            if group is not None:
                dist.all_reduce(loads, group=group)
        ep_size = groups.size("ep")
        most = loads[:-1].view(ep_size, -1).sum(1).max()
        ratio = most.double() * ep_size / loads.sum().clamp(min=1)
        if groups.edp is not None:
            # FSDP gathers the experts' weights in every turn, which is a collective of the ranks with the same experts
            dist.all_reduce(ratio, op=dist.ReduceOp.MAX, group=groups.edp)
        return max(1, ceil(float(ratio) / max_rows))


_DISPATCHERS: dict[str, type[MoETokenDispatcher[Any, Any]]] = {
    "all_gather": MoEAllGatherTokenDispatcher,
    "all_to_all": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
    "symmetric": MoESymmetricTokenDispatcher,
}
