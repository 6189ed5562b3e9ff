"""moe_layer: a router that sends every token to one rank costs time, in rounds of all ranks, but no memory."""

import torch
import torch.distributed as dist

from megalith.config import DispatchConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import local
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.routing import Routing
from tests.live_memory import LiveMemory
from tests.rank_pool import ranks
from tests.transformer.moe.layers import layer_of, rows_of

E, K, H, F, T = 8, 2, 16, 64, 256
EVEN_ROWS = T * K  # rows that a rank's experts receive under even loads


def peak(one_rank: bool, max_rows: float | None) -> int:
    """Peak bytes held by forward and backward of a layer on this rank of EP 4."""
    groups = ParallelState(RankGrid(dist.get_world_size(), expert=4)).collection()
    build = BuildOptions(groups, torch.float64, dispatch=DispatchConfig(max_rows=max_rows))
    layer = layer_of(build, num_experts=E, top_k=K, ffn_hidden_size=F, router={"bias": True})
    x = rows_of(dist.get_rank(), T, 1, H).requires_grad_()
    with torch.no_grad():
        local(layer.gate.weight).zero_()
        if one_rank:
            local(layer.gate.bias).copy_(torch.tensor([20.0, 20.0, *[0.0] * (E - K)]))
        else:  # each token chooses two adjacent experts, every pair equally often
            local(layer.gate.weight)[:, :E] = 20 * torch.eye(E)
            x.data[:, 0, :E] = torch.eye(E)[torch.arange(T) % E] + torch.eye(E)[(torch.arange(T) + 1) % E]
    with LiveMemory() as memory:
        layer(x, LayerContext()).sum().backward()
    return memory.peak


def test_memory_under_a_router_that_sends_all_tokens_to_one_rank_is_that_of_even_loads():
    even = max(ranks(4, peak, False, None))
    hidden = EVEN_ROWS * 3 * F * 8  # bytes of the experts' activations: gate and up, and their product
    assert even > hidden
    assert max(ranks(4, peak, True, None)) > even + 3 * hidden  # all at once: four times the rows
    assert max(ranks(4, peak, True, 1.0)) < 1.25 * even


def turns(loads: list[list[int]], max_rows: float, expert_tensor: int = 1) -> int:
    """The turns of this rank of EP 2; ``loads``: how often its tokens choose each expert, or are dropped (third)."""
    groups = ParallelState(RankGrid(dist.get_world_size(), expert=2, expert_tensor=expert_tensor)).collection()
    build = BuildOptions(groups, torch.float64, dispatch=DispatchConfig(max_rows=max_rows))
    layer = layer_of(build, num_experts=2, top_k=1, router={"score_function": "sigmoid"})
    mine = torch.tensor(loads[dist.get_rank()])
    indices = torch.arange(len(mine)).repeat_interleave(mine).unsqueeze(1)
    routing = Routing(indices, indices.double(), mine[:2])
    return layer._num_turns(routing, max_rows)


def test_all_ranks_with_the_same_experts_take_as_many_turns_as_the_one_of_the_most_uneven_loads():
    # ranks 0 and 1 are an expert-parallel group, with 6 rows each; 2 and 3 another, with 11 and 1, 11/6 of an even load
    assert ranks(4, turns, [[3, 3], [3, 3], [6, 0], [5, 1]], 0.5) == [4] * 4
    assert ranks(4, turns, [[3, 3], [3, 3], [6, 0], [5, 1]], 1.0) == [2] * 4


def test_ranks_that_share_each_expert_take_as_many_turns_as_their_rows_together_need():
    # ranks 0 and 1 have one expert, 2 and 3 the other: 18 and 6 of 24 rows, though 0 and 2 alone send 12 and 0
    assert ranks(4, turns, [[6, 0], [3, 3], [6, 0], [3, 3]], 0.5, expert_tensor=2) == [3] * 4


def test_choices_that_are_dropped_take_no_turns():
    # 5 and 1 of 12 choices are left: 5/6 of an even load of all choices
    assert ranks(2, turns, [[3, 0, 3], [2, 1, 3]], 0.5) == [2] * 2
