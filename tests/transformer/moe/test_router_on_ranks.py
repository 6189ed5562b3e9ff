"""router: ranks that share the tokens together have the losses, gradients, loads and choices of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.parallel.context.zigzag import zigzag_positions
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.balance import update_expert_bias_
from megalith.transformer.step_record import StepRecord
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.moe.routers import LAYER, H, keyed, router_of, x_of

TOLERANCE = 1e-12
S, B, E, K = 16, 2, 8, 2
NUM_BATCHES, LOSS_SCALE = 4, 8.0  # over all micro-batches and data-parallel ranks
RATIOS = {"sequence_balance": 0.3, "micro_batch_balance": 0.2, "global_balance": 0.1, "z_loss": 0.05}
Result = dict[str, Any]


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [S, B, H], which tokens are real, and their global ids, [S, B] each."""
    ids = ((number * B + torch.arange(B)) * S + torch.arange(S)[:, None]).contiguous()
    return x_of(S, B, number), (ids * 7) % 11 != 3, ids


def step(
    settings: dict[str, Any],
    layout: dict[str, int],
    *,
    padded: bool = True,
    alone: bool = False,
    bias: Tensor | None = None,
) -> Result:
    """A step on this rank of ``layout``, summed over all ranks; ``alone``: on one process with all batches."""
    groups = None if alone else collection(**layout)
    build = None if groups is None else {"pg_collection": groups, "sequence_parallel": True}
    router = router_of(build=build, **settings)
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    size = {axis: 1 if groups is None else groups.size(axis) for axis in ("tp", "cp", "dp")}
    rank = {axis: 0 if groups is None else groups.rank(axis) for axis in size}
    positions = zigzag_positions(S, size["cp"], rank["cp"]).chunk(size["tp"])[rank["tp"]]
    num_micro_batches = NUM_BATCHES // size["dp"]
    record = StepRecord(LOSS_SCALE / NUM_BATCHES)
    indices = {}
    for index in range(num_micro_batches):
        number = index * size["dp"] + rank["dp"]
        x, mask, ids = (each[positions] for each in batch(number))
        context = LayerContext(hidden_dropout_key=keyed(ids).hidden_dropout_key, record=record.micro_batch(index))
        routing = router(x, context, mask if padded else None)
        # a loss of the weights themselves, which is not divided by any count
        (routing.weights * (ids.view(-1, 1) % 5 + torch.arange(K))).sum().backward()
        chosen = routing.indices.tolist()
        indices |= dict(zip(ids.flatten().tolist(), chosen, strict=True))
    loads = record.tokens_per_expert(LAYER)
    offsets = record.total("quantile_offsets", LAYER)
    result: Result = {
        "dw": whole(router.weight.grad),
        "loads": loads,
        "losses": torch.tensor([float(record.loss(name, LAYER) or 0.0) for name in RATIOS], dtype=torch.float64)
        / NUM_BATCHES,
        "offsets": torch.zeros(E + 1, dtype=torch.float64) if offsets is None else offsets,
    }
    if groups is not None:
        for axis in ("cp", "dp"):  # as FSDP2 sums gradients; the sum over tp happens where the weight is used
            if size[axis] > 1:
                dist.all_reduce(result["dw"], group=getattr(groups, axis))
        for name in ("loads", "losses", "offsets"):
            dist.all_reduce(result[name])
    result["offsets"] = result["offsets"] / result["offsets"][-1].clamp_min(1)
    return result | {"indices": indices}


def check(settings: dict[str, Any], layout: dict[str, int], *, padded: bool = True) -> None:
    num_ranks = layout.get("tensor", 1) * layout.get("context", 1) * layout.get("replicate", 1)
    wanted, indices = step(settings, {}, padded=padded, alone=True), {}
    all_indices = wanted.pop("indices")
    for got in ranks(num_ranks, step, settings, layout, padded=padded):
        indices |= got.pop("indices")
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert indices == all_indices


LAYOUTS = {
    "tp 2": {"tensor": 2},
    "cp 2": {"context": 2},
    "dp 2": {"replicate": 2},
    "tp 2, cp 2": {"tensor": 2, "context": 2},
    "tp 2, dp 2": {"tensor": 2, "replicate": 2},
    "cp 2, dp 2": {"context": 2, "replicate": 2},
}


@pytest.mark.parametrize("layout", ["tp 2", "cp 2", "tp 2, cp 2"])
def test_the_gradient_of_every_balance_loss_is_that_of_one_process_where_ranks_share_a_micro_batch(layout):
    check({**RATIOS, "score_function": "sigmoid", "jitter": 0.1}, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["dp 2", "tp 2, dp 2", "cp 2, dp 2"])
def test_the_gradient_of_every_balance_loss_but_the_global_is_the_mean_over_micro_batches_of_all_ranks(layout):
    check({**RATIOS, "global_balance": 0.0}, LAYOUTS[layout])


def global_gradient(layout: dict[str, int]) -> Tensor:
    """The router's gradient of the global loss, on all ranks of ``layout``."""
    return step({"global_balance": 1.0}, layout, padded=False)["dw"] - step({}, layout, padded=False)["dw"]


def global_gradient_by_formula(num_dp_ranks: int) -> Tensor:
    """coefficient x the mean over batches of L, each batch with the loads of all batches up to its time."""
    router = router_of()
    choices, num_tokens, total = torch.zeros(E), 0, 0.0
    for first in range(0, NUM_BATCHES, num_dp_ranks):
        batches = [batch(number)[0].view(S * B, H) @ router.weight.t() for number in range(first, first + num_dp_ranks)]
        for logits in batches:
            choices = choices + torch.bincount(logits.topk(K).indices.flatten(), minlength=E)
            num_tokens += S * B
        for logits in batches:
            P = logits.softmax(dim=1).sum(dim=0)
            total = total + E / (K * S * B * num_tokens) * (P * choices).sum()
    (LOSS_SCALE * total / NUM_BATCHES).backward()
    return router.weight.grad


@pytest.mark.parametrize("layout", ["dp 2", "tp 2, dp 2", "cp 2, dp 2"])
def test_the_global_loss_counts_the_loads_of_all_data_parallel_ranks_and_is_not_divided_by_them(layout):
    num_ranks = 2 if layout == "dp 2" else 4
    for gradient in ranks(num_ranks, global_gradient, LAYOUTS[layout]):
        torch.testing.assert_close(gradient, global_gradient_by_formula(2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("selection", ["sinkhorn", "quantile", "round_robin"])
@pytest.mark.parametrize("layout", ["tp 2", "cp 2", pytest.param("tp 2, cp 2", marks=pytest.mark.slow)])
def test_choices_that_look_at_the_whole_micro_batch_are_those_of_one_process(layout, selection):
    check({"selection": selection, "z_loss": 0.1}, LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["sinkhorn", "quantile", "round_robin"])
@pytest.mark.parametrize("layout", ["dp 2", "tp 2, dp 2", "cp 2, dp 2"])
def test_choices_of_other_data_parallel_ranks_are_none_of_a_ranks_business(layout, selection):
    check({"selection": selection, "z_loss": 0.1}, LAYOUTS[layout])


def bias_after_three_steps(layout: dict[str, int], alone: bool = False) -> Tensor:
    """The bias after three steps, each with the loads under the previous bias."""
    bias = torch.zeros(E)
    for rate in (0.1, 0.2, 0.3):
        settings = {"score_function": "sigmoid", "expert_bias_update_rate": rate}
        loads = step(settings, layout, alone=alone, bias=bias)["loads"]
        update_expert_bias_(bias, loads, rate)
    return bias


def test_all_ranks_move_the_bias_by_the_loads_of_all_tokens():
    wanted = bias_after_three_steps({}, alone=True)
    assert wanted.any()
    for bias in ranks(4, bias_after_three_steps, LAYOUTS["tp 2, dp 2"]):
        assert torch.equal(bias, wanted)
