"""step_traffic of layers with experts: what gloo ranks exchange, byte by byte, with even and uneven loads."""

from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.config.layout import Layout
from megalith.errors import ConfigError
from megalith.parallel.expert.traffic import Rows
from megalith.parallel.traffic import Passes, Traffic
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.training import setup
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.traffic import step_traffic
from megalith.transformer.moe import token_dispatcher
from megalith.transformer.moe.traffic import MicroBatch, dispatch_traffic
from tests.rank_pool import ranks, renew_ranks
from tests.tiny_run import SEQ, settings
from tests.training.recorder import APART, Recorder
from tests.training.test_moe_layouts import UNEVEN as SHARDED_UNEVENLY
from tests.training.test_traffic import check, num_operations, take_step

E, K = 4, 2
EVEN = {"selection": "round_robin"}
LOSSES = {"sequence_balance": 0.1, "global_balance": 0.1, "z_loss": 0.1}
FOLDED = {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}
# ranks, parallel, model.moe, and other settings: loads are even, or there is space for as many rows
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "expert 2": (2, {"expert": 2}, {"router": EVEN}, {}),
    "expert 2, gathered": (2, {"expert": 2, "dispatch": {"method": "all_gather"}}, {"router": EVEN}, {}),
    "expert 2, latents, every other layer, shared": (
        2,
        {"expert": 2},
        {"router": EVEN, "latent_size": 16, "layers": [False, True], "shared_ffn_hidden_size": 16},
        {"model": {"mlp_bias": True, "activation": "squared_relu"}},
    ),
    "folded, padded": (2, FOLDED, {"capacity": {"factor": 1.25, "pad": True}, "shared_ffn_hidden_size": 16}, {}),
    "expert 2 x expert tensor 2": (4, {"expert": 2, "expert_tensor": 2}, {"router": {**EVEN, "z_loss": 0.1}}, {}),
    "expert 2 x expert tensor 2, gathered": (
        4,
        {"expert": 2, "expert_tensor": 2, "dispatch": {"method": "all_gather"}},
        {"router": {"selection": "sinkhorn"}},
        {},
    ),
    "tensor 2 x context 2 x expert 2, choices over all": (
        4,
        {"tensor": 2, "sequence": True, "context": 2, "expert": 2, "dispatch": {"method": "all_gather"}},
        {"router": {"selection": "quantile"}, "shared_ffn_hidden_size": 16, "shared_expert_gate": True},
        {},
    ),
    "expert 2, sharded, a bound that is met": (
        4,
        {"expert": 2, "dispatch": {"max_rows": 1.5}},
        {"router": EVEN},
        {"precision": {"dtype": "bfloat16"}},
    ),
    "expert 2 x replicate 2": (
        4,
        {"expert": 2, "replicate": 2},
        {
            "router": {"score_function": "sigmoid", "expert_bias_update_rate": 0.1},
            "capacity": {"factor": 1, "pad": True},
        },
        {},
    ),
    "pipeline 2 x expert 2": (4, {"pipeline": 2, "expert": 2}, {"router": EVEN}, {}),
    "tensor 2, experts whole": (4, {"tensor": 2, "sequence": True, "expert_tensor": 1}, {"router": EVEN}, {}),
}
UNEVEN: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert": 2}),
    "expert 2 x expert tensor 2": (4, {"expert": 2, "expert_tensor": 2}),
    "tensor 2 x expert 4": (4, {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 1}),
    "pipeline 2 x expert 2": (4, {"pipeline": 2, "expert": 2}),
}
ODD_LATENTS = "latents are odd, and what is inside of the experts is cut"
IN_MAKE_TEST = ("expert 2, gathered", "folded, padded")


@pytest.fixture(autouse=True, scope="module")
def new_ranks() -> None:
    """DTensor may reuse the mesh of an earlier run in the same process, whose groups the recorder cannot tell apart."""
    renew_ranks()


def sample(names: dict[str, Any], kept: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", sample(CASES, IN_MAKE_TEST))
def test_ranks_exchange_what_is_counted_with_even_loads(name, tmp_path):
    num_ranks, parallel, moe, others = CASES[name]
    model = {"moe": {"num_experts": E, "top_k": K, **moe}, **others.get("model", {})}
    check(settings(tmp_path, **{**others, "parallel": parallel, "model": model}), num_ranks)


@pytest.mark.parametrize(
    "name", sample(SHARDED_UNEVENLY, ("latents are odd, and what is inside of the experts is cut",))
)
def test_weights_of_experts_are_gathered_in_the_parts_that_fsdp_cuts(name, tmp_path):
    num_ranks, parallel, model = SHARDED_UNEVENLY[name]
    model = {**model, "moe": {**model["moe"], "router": EVEN}}
    train = {"global_batch_size": 12, "micro_batch_size": 1}
    check(settings(tmp_path, train=train, model=model, parallel=parallel), num_ranks)


def exchanged_with_loads(tree: dict[str, Any], num_ranks: int) -> tuple[Traffic, Traffic, list[list[int]]]:
    """What this rank exchanges in the second step, what is counted for even loads, and its load [E] at each send."""
    config = load_run(tree, world_size=num_ranks)
    with patch.object(setup, "ParallelState", partial(ParallelState, group_options=APART)):
        run = build_run(config, torch.device("cpu"))
    take_step(run)
    recorder, before, loads = Recorder(), num_operations(), list[list[int]]()
    send = token_dispatcher.MoEAlltoAllTokenDispatcher.send

    def noted(self: Any, tokens: Any, routing: Any, capacity: int | None = None) -> Any:
        loads.append(torch.bincount(routing.indices.flatten(), minlength=E).tolist())
        return send(self, tokens, routing, capacity)

    with patch.object(token_dispatcher.MoEAlltoAllTokenDispatcher, "send", noted), recorder:
        take_step(run)
    assert recorder.found.total() == (num_operations() - before).total(), "the recorder has missed some"
    return recorder.found, step_traffic(config, run.task, num_ranks, dist.get_rank()), loads


@pytest.mark.parametrize("name", sample(UNEVEN, ("expert 2",)))
def test_ranks_exchange_what_is_counted_for_the_loads_of_the_step(name, tmp_path):
    num_ranks, parallel = UNEVEN[name]
    tree = settings(tmp_path, model={"moe": {"num_experts": E, "router": LOSSES}}, parallel=parallel)
    config = load_run(tree, world_size=num_ranks)
    layout = config.parallel.layout(num_ranks)
    grid, T = RankGrid(layout), SEQ * config.train.micro_batch_size // layout.tensor // layout.context
    batch = MicroBatch(config.train.micro_batch_size, T, torch.float64)
    count = partial(dispatch_traffic, config.model, config.parallel.dispatch, layout, batch)
    results = ranks(num_ranks, exchanged_with_loads, tree, num_ranks)
    of_ranks = [loads for _, _, loads in results]
    assert any(len(set(load)) > 1 for load in of_ranks[0])
    for rank, (found, counted, loads) in enumerate(results):
        for number in range(len(loads)):
            counted.subtract(both(count(Rows.even(T * K, layout.expert_tensor))))
            counted.update(both(count(rows_at(number, of_ranks, grid, rank, layout))))
        recorded = {each: times for each, times in found.items() if each.kind != "receive"}
        assert recorded == {each: times for each, times in counted.items() if times}, f"on rank {rank}"


def rows_at(number: int, of_ranks: list[list[list[int]]], grid: RankGrid, rank: int, layout: Layout) -> Rows:
    """The rows of ``rank`` when all ranks of its ep and etp send for the ``number``-th time."""
    loads = [[of_ranks[other][number] for other in grid.group_of("ep", first)] for first in grid.group_of("etp", rank)]
    return Rows.of_loads(loads, grid.position("ep", rank), grid.position("etp", rank))


def both(passes: Passes) -> Counter[Any]:
    return passes.forward + passes.backward


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"recompute": "full"}}, "not counted with train.recompute"),
        (
            {"parallel": {"expert": 2, "dispatch": {"method": "flex"}}, "precision": {"dtype": "bfloat16"}}
            | {"experimental": ["deep_ep"]},
            "traffic through DeepEP is not counted; use .*all_to_all",
        ),
        (
            {"parallel": {"expert": 2, "dispatch": {"method": "symmetric"}}, "experimental": ["symmetric_memory"]},
            "traffic through torch's symmetric memory is not counted; use .*all_to_all",
        ),
        (
            {"parallel": {"expert": 2, "dispatch": {"max_rows": 0.5}}},
            "max_rows=0.5, balanced loads take several rounds",
        ),
    ],
)
def test_what_is_not_counted_is_said(changes, message, tmp_path):
    groups = {"model": {"moe": {"num_experts": E}}, "parallel": {"expert": 2}, **changes}
    config = load_run(settings(tmp_path, **groups), world_size=2)
    with pytest.raises(ConfigError, match=message):
        step_traffic(config, task_of(config), 2, 0)
