"""executor: every action of a plan in order, gradients that add up and are reduced once, nothing kept too long."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from megalith.parallel.pipeline import executor
from megalith.parallel.pipeline.executor import Forward
from megalith.parallel.pipeline.links import Links
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Action, Plan, Schedule
from megalith.parallel.pipeline.schedules import build_schedule, forward_only
from megalith.parallel.pipeline.split_product import SplitProduct

NUM = 3


class Chunk(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), factor))


@pytest.fixture
def syncs(monkeypatch) -> list[tuple[nn.Module, bool]]:
    """Records what the executor would tell FSDP2."""
    told: list[tuple[nn.Module, bool]] = []
    monkeypatch.setattr(executor, "gradient_sync", lambda chunk, last, keeps_weights: told.append((chunk, last)))
    monkeypatch.setattr(executor, "finish_backward", lambda chunk: told.append((chunk, "finished")))
    return told


def execute(plan: Plan, chunks: list[nn.Module], forward: Forward, product: SplitProduct | None = None) -> None:
    """Runs ``plan`` on the only rank of a pipeline whose hidden states are scalars."""
    schedule = Schedule(Placement(1, len(chunks)), NUM, (plan,))
    executor.execute(schedule, Links(), chunks, forward, lambda micro_batch: (), product)


def one_stage_plan(num_microbatches: int, *, backward: bool) -> Plan:
    placement = Placement(1)
    schedule = build_schedule("1f1b", 1, num_microbatches) if backward else forward_only(placement, num_microbatches)
    return schedule.plans[0]


def forward(seen: list[Tensor]) -> Forward:
    """(index + 1) * weight, times the previous chunk's output; calls are recorded in ``seen``."""

    def run(chunk: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        seen.append((chunk, micro_batch))
        return (micro_batch + 1.0) * chunk.weight * (1.0 if hidden is None else hidden)

    return run


def test_the_plan_of_one_stage_takes_each_micro_batch_back_at_once_and_reduces_with_the_last():
    assert one_stage_plan(3, backward=True) == (
        Action("forward", 0),
        Action("backward", 0),
        Action("forward", 1),
        Action("backward", 1),
        Action("forward", 2),
        Action("backward", 2, reduces=True),
    )
    assert one_stage_plan(2, backward=False) == (Action("forward", 0), Action("forward", 1))


def test_gradients_accumulate_over_micro_batches(syncs):
    chunk, seen = Chunk(5.0), []
    execute(one_stage_plan(NUM, backward=True), [chunk], forward(seen))
    assert seen == [(chunk, 0), (chunk, 1), (chunk, 2)]
    assert chunk.weight.grad.item() == 1.0 + 2.0 + 3.0
    execute(one_stage_plan(1, backward=True), [chunk], forward(seen))
    assert chunk.weight.grad.item() == 7.0, "it drops no gradient that was there"


def test_only_the_backward_that_the_plan_marks_reduces(syncs):
    chunk = Chunk(5.0)
    execute(one_stage_plan(NUM, backward=True), [chunk], forward([]))
    assert syncs == [(chunk, False), (chunk, False), (chunk, True)]


def test_it_is_said_before_each_backward_whether_it_reduces(monkeypatch):
    gradients = []
    monkeypatch.setattr(
        executor, "gradient_sync", lambda chunk, last, keeps_weights: gradients.append(chunk.weight.grad is None)
    )
    execute(one_stage_plan(1, backward=True), [Chunk(1.0)], forward([]))
    assert gradients == [True], "the backward had not begun"


def test_chunks_and_micro_batches_are_told_apart_in_any_order(syncs):
    first, second = Chunk(5.0), Chunk(7.0)
    plan = (
        Action("forward", 0, chunk=0),
        Action("forward", 0, chunk=1),
        Action("forward", 1, chunk=0),
        Action("forward", 1, chunk=1),
        Action("backward", 0, chunk=1),
        Action("backward", 1, chunk=1, reduces=True),
        Action("backward", 1, chunk=0),
        Action("backward", 0, chunk=0, reduces=True),
    )
    seen: list[tuple[nn.Module, int]] = []
    execute(plan, [first, second], forward(seen))
    assert seen == [(first, 0), (second, 0), (first, 1), (second, 1)]
    # the product of both weights and the square of (index + 1), summed
    assert (first.weight.grad.item(), second.weight.grad.item()) == (7.0 * (1 + 4), 5.0 * (1 + 4))
    assert syncs == [(second, False), (second, True), (first, False), (first, True)]


def alive_during(plan: tuple[Action, ...]) -> list[int]:
    """For each forward, how many earlier results are still alive."""
    results: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def run(chunk: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        alive.append(sum(result() is not None for result in results))
        y = chunk.weight * 1.0
        results.append(weakref.ref(y))
        return y

    execute(plan, [Chunk(1.0)], run)
    alive.append(sum(result() is not None for result in results))
    return alive


def test_a_plan_of_forwards_keeps_no_result_and_syncs_nothing(syncs):
    chunk = Chunk(5.0)
    execute(one_stage_plan(NUM, backward=False), [chunk], forward([]))
    assert chunk.weight.grad is None
    assert syncs == []
    # the loop variable holds the last one until the next iteration
    assert max(alive_during(one_stage_plan(NUM, backward=False))) <= 1


def test_a_result_is_kept_until_its_backward_and_no_longer(syncs):
    assert max(alive_during(one_stage_plan(NUM, backward=True))) <= 1
    warm_up = tuple(Action("forward", i) for i in range(NUM)) + tuple(Action("backward", i) for i in range(NUM))
    assert alive_during(warm_up)[:NUM] == [0, 1, 2]


class Product(nn.Module):
    """A product with a weight [1, 1], plus a term whose gradient is not deferred."""

    def __init__(self, product: SplitProduct) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 1), 5.0))
        self.addend = nn.Parameter(torch.zeros(()))
        self.product = product

    def forward(self, factor: float) -> Tensor:
        x = torch.full((1, 1), factor, requires_grad=True)
        return self.product(x, self.weight, None).sum() + self.addend


def split_plan(*steps: str) -> Plan:
    """Parses a plan such as "F0 I0 W0"; the last W reduces."""
    kinds = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
    last = max(number for number, step in enumerate(steps) if step[0] == "W")
    return tuple(Action(kinds[step[0]], int(step[1:]), reduces=number == last) for number, step in enumerate(steps))


def test_a_split_backward_adds_to_each_weight_in_the_action_that_the_plan_says(monkeypatch):
    product = SplitProduct()
    chunk, at_sync, finished = Product(product), [], []

    def gradients() -> tuple[float, float]:
        return tuple(0.0 if each.grad is None else each.grad.item() for each in (chunk.weight, chunk.addend))

    monkeypatch.setattr(executor, "gradient_sync", lambda *_, last, **__: at_sync.append((*gradients(), last)))
    monkeypatch.setattr(executor, "finish_backward", lambda _: finished.append(gradients()))
    plan = split_plan("F0", "F1", "I0", "F2", "I1", "W1", "I2", "W0", "W2")
    execute(plan, [chunk], lambda chunk, micro_batch, hidden: chunk(10.0**micro_batch), product)
    assert at_sync == [
        (0.0, 0.0, False),  # I0
        (0.0, 1.0, False),  # I1
        (0.0, 2.0, False),  # W1
        (10.0, 2.0, False),  # I2
        (10.0, 3.0, False),  # W0
        (11.0, 3.0, False),  # W2
        (111.0, 3.0, True),  # W2, which reduces the accumulated gradients
    ]
    assert finished == [(10.0, 3.0 - 1.0), (11.0, 3.0), (111.0, 3.0), (111.0, 3.0)]
    assert product.take() == []


def test_the_graph_goes_with_the_backward_of_the_input_and_the_rest_with_that_of_the_weights(syncs):
    product, results, alive = SplitProduct(), [], []
    chunk = Product(product)

    def run(chunk: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        alive.append([result() is not None for result in results])
        x = torch.full((1, 1), 2.0, requires_grad=True) * 1.0
        y = product(x, chunk.weight, None)
        results.extend((weakref.ref(x), weakref.ref(y)))
        return torch.sin(y).sum()  # its backward needs y

    execute(split_plan("F0", "I0", "F1", "W0", "F2", "I1", "W1", "I2", "W2"), [chunk], run, product)
    alive.append([result() is not None for result in results])
    assert alive == [[], [True, False], [False, False, True, True], [False] * 6]
