"""pipeline: real ranks compute what one process does, with no more activations than the schedule promises."""

import re
import weakref
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from megalith.errors import ConfigError, ShapeError
from megalith.parallel.build_options import MatrixProduct
from megalith.parallel.pipeline import executor
from megalith.parallel.pipeline.links import Links, Messages, open_links
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    forward_only,
    placement_of,
    splits_backward,
)
from megalith.parallel.pipeline.simulate import Costs, simulate
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from tests.rank_pool import ranks

H = 4


def shape_of(micro_batch: int) -> tuple[int, ...]:
    """Micro-batches of different lengths."""
    return micro_batch + 1, H


class Part(nn.Module):
    """One stage: tanh of a product with a matrix derived from the stage's number."""

    def __init__(self, stage: int, product: MatrixProduct = linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(H, H, generator=generator, dtype=torch.float64))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.product(x, self.weight, None))


def first_input(micro_batch: int) -> Tensor:
    return torch.randn(shape_of(micro_batch), generator=torch.Generator().manual_seed(micro_batch)).double()


def in_one_process(num_stages: int, num_microbatches: int) -> list[Tensor]:
    """The gradient of each stage's matrix, computed in one process."""
    model = nn.Sequential(*(Part(stage) for stage in range(num_stages)))
    for number in range(num_microbatches):
        model(first_input(number)).sum().backward()
    return [part.weight.grad for part in model]


class Live:
    """Counts the inputs of matrix products that are alive, and their maximum."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.most = 0
        self._numbers = count()

    def follow(self, x: Tensor) -> Tensor:
        """A copy of ``x``, counted until it is freed."""
        number, x = next(self._numbers), x.clone()
        self.alive.add(number)
        self.most = max(self.most, len(self.alive))
        weakref.finalize(x, self.alive.discard, number)
        return x


class Counted(Messages):
    """Records the maximum number of messages kept alive until they had arrived."""

    most = 0

    def _give(self, *message: Any) -> None:
        super()._give(*message)
        Counted.most = max(Counted.most, len(self._sent))


def gradients_and_live(schedule: str, num_chunks: int, num_microbatches: int) -> tuple[dict[int, Tensor], int, int]:
    """The gradients of this rank's stages, by number, and the most activations and sent messages that it kept."""
    rank, p = dist.get_rank(), dist.get_world_size()
    placement = placement_of(schedule, p, num_chunks)
    links = open_links(placement, ParallelState(RankGrid(p, pipeline=p)), torch.float64, torch.device("cpu"))
    product = SplitProduct() if splits_backward(schedule) else None
    chunks = [Part(placement.stage(rank, chunk), product or linear) for chunk in range(num_chunks)]
    pipeline = Pipeline(chunks, placement, schedule, links, product)
    live = Live()

    def forward(chunk: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        x = first_input(micro_batch).requires_grad_() if hidden is None else hidden
        y = chunk(live.follow(x))
        return y.sum() if pipeline.holds_output(chunk) else y

    Counted.most = 0
    with (
        patch.object(executor, "gradient_sync", lambda chunk, last, keeps_weights: None),
        patch.object(executor, "finish_backward", lambda chunk: None),
        patch.object(executor, "Messages", Counted),
    ):
        pipeline.train(num_microbatches, forward, shape_of)
        for chunk in chunks:  # a second step begins where the first ended
            chunk.weight.grad = None
        pipeline.train(num_microbatches, forward, shape_of)
    stages = {placement.stage(rank, chunk): part.weight.grad for chunk, part in enumerate(chunks)}
    return stages, live.most, Counted.most


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_chunks", "num_microbatches"),
    [
        ("gpipe", 2, 1, 5),
        ("1f1b", 4, 1, 7),
        ("1f1b", 4, 1, 2),
        ("1f1b", 2, 1, 16),
        ("interleaved", 2, 3, 4),
        ("interleaved", 4, 2, 8),
        ("zero_bubble", 4, 1, 7),
        ("zero_bubble", 4, 1, 2),
        ("zero_bubble", 2, 1, 16),
        ("zb_v", 2, 2, 5),
        ("zb_v", 2, 2, 1),
        ("zb_v", 4, 2, 9),
    ],
)
def test_gradients_are_those_of_one_process_and_no_more_is_live_than_promised(
    schedule, num_ranks, num_chunks, num_microbatches
):
    p, m, v = num_ranks, num_microbatches, num_chunks
    want = in_one_process(p * v, m)
    planned = simulate(build_schedule(schedule, p, m, v), Costs()).peak_live_activations
    for rank, (found, live, sent) in enumerate(ranks(p, gradients_and_live, schedule, v, m)):
        for stage, gradient in found.items():
            torch.testing.assert_close(gradient, want[stage], rtol=1e-13, atol=1e-13)
        promised = {
            "gpipe": m,
            "1f1b": min(p - rank, m),
            "interleaved": min(2 * (p - rank - 1) + (v - 1) * p + 1, v * m),
            "zero_bubble": min(p, m),
            "zb_v": min(2 * p, 2 * m),
        }
        assert live == planned[rank] <= promised[schedule]
        if not splits_backward(schedule):
            assert live == promised[schedule]
        if schedule == "1f1b":  # an output for each activation, plus gradients not yet known to have been used
            assert sent <= 2 * p


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_split_product_is_for_schedules_that_split_backwards_and_they_need_one(schedule):
    splits = schedule in ("zero_bubble", "zb_v")
    Pipeline([nn.Identity()], schedule=schedule, split_product=SplitProduct() if splits else None)
    with pytest.raises(ConfigError, match=f"split_product must be the SplitProduct .* for schedule='{schedule}'"):
        Pipeline([nn.Identity()], schedule=schedule, split_product=None if splits else SplitProduct())


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match=r"must be one of gpipe, 1f1b, .*; got '1F1B'"):
        Pipeline([nn.Identity()], schedule="1F1B")


def outcome_of(wrong: str) -> str:
    """The result if a stage sends hidden states other than declared; rank 1 only waits for valid ones."""
    placement, rank = Placement(2), dist.get_rank()
    links = open_links(placement, ParallelState(RankGrid(2, pipeline=2)), torch.float32, torch.device("cpu"))
    if rank == 1 and wrong != "nothing":
        return ""
    messages = Messages(links, forward_only(placement, 1), lambda micro_batch: (2, H))
    if rank == 1:
        return str(messages.input_of(0, 0))
    given = {"shape": torch.ones(3, H), "dtype": torch.ones(2, H, dtype=torch.float64), "nothing": torch.ones(2, H)}
    try:
        messages.send_output(0, 0, given[wrong])
    except ShapeError as error:
        return str(error)
    messages.finish()
    return ""


@pytest.mark.parametrize(
    ("wrong", "told"), [("shape", r"got \[3, 4\] and torch.float32"), ("dtype", r"got \[2, 4\] and torch.float64")]
)
def test_hidden_states_of_another_shape_or_dtype_are_refused_where_they_are_made(wrong, told):
    message, _ = ranks(2, outcome_of, wrong)
    wanted = r"the output of micro-batch 0 .*stage 0\) must have shape \[2, 4\] and dtype torch.float32"
    assert re.search(f"{wanted}.*{told}", message)
    assert ranks(2, outcome_of, "nothing")[0] == ""


def test_a_message_out_of_the_order_of_the_plan_is_noticed_before_it_is_sent():
    schedule = forward_only(Placement(2), 2)
    messages = Messages(Links(rank=0, global_ranks=(0, 1)), schedule, lambda _: (H,))
    with pytest.raises(AssertionError, match=r"sends the output of micro-batch 0 .* got the output of micro-batch 1"):
        messages.send_output(1, 0, torch.zeros(H))
