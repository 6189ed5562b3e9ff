"""FullCudaGraph against eager iterations: on a CPU by repeating operators, on a GPU by a real graph."""

import contextlib
import logging
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.acceleration.full_cuda_graph import FullCudaGraph
from tests.acceleration.iterations import CPU, DEVICES, B, Linear, S, V, gpt, inputs


def trained(device: torch.device, wrapped: Callable[..., Callable[..., Tensor]]) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of 20 steps of two micro-batches, whose scale changes from step to step."""
    model = gpt(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def iteration(micro_batches: list[tuple[Tensor, Tensor]], scale: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        for tokens, labels in micro_batches:
            loss = model(tokens, labels=labels).mean() * scale
            loss.backward()
            total += loss.detach()
        return total

    run = wrapped(iteration, model.parameters(), device)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(20):
        batch = torch.randint(V, (2, 2, B, S), generator=generator)
        losses.append(run([(tokens, labels) for tokens, labels in batch], torch.tensor(0.5 + 0.01 * step)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
def test_twenty_steps_of_a_gpt_are_bitwise_those_of_eager_iterations(device, recorders):
    def eager(function: Callable[..., Tensor], *_: object) -> Callable[..., Tensor]:
        return lambda batch, scale: function([(x.to(device), y.to(device)) for x, y in batch], scale.to(device))

    graphs: list[FullCudaGraph] = []

    def graphed(*args: Any) -> FullCudaGraph:
        graphs.append(FullCudaGraph(*args))
        return graphs[-1]

    (losses, weights), (want_losses, want_weights) = trained(device, graphed), trained(device, eager)
    assert losses == want_losses
    assert all(map(torch.equal, weights, want_weights))
    assert graphs[0].is_captured
    assert [recorder.num_replays for recorder in recorders] == ([18] if device == CPU else [])


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_copied_to_the_same_memory_and_python_runs_until_the_capture_only(device, recorders):
    iteration = Linear(device)
    graph = iteration.graph(num_warmups=3)
    results = []
    for x in inputs(8, 4, 2, device=device):
        results.append(graph(x))
        iteration.check(results[-1], x)
    assert len(iteration.addresses) == 3 + 1
    assert len(set(iteration.addresses)) == 1
    assert len({result.data_ptr() for result in results}) == 8  # copies, so that the next replay keeps them
    assert all(a != b for a, b in pairwise(results))


@pytest.mark.parametrize("device", DEVICES)
def test_another_kind_of_inputs_is_run_and_captured_anew(device, recorders):
    iteration = Linear(device)
    graph = iteration.graph(num_warmups=1)
    for rows, num_pythons in ((4, 2), (5, 4), (4, 6)):
        for x in inputs(4, rows, 2, device=device):
            iteration.check(graph(x), x)
        assert len(iteration.addresses) == num_pythons
        assert graph.is_captured


def move_the_weight(graph: FullCudaGraph, iteration: Linear, x: Tensor) -> tuple[Any, ...]:
    iteration.weight.data = iteration.weight.data + 1.0
    return (x, 1)


OTHERS = {
    "dtype": lambda graph, iteration, x: (x.double(), 1),
    "a moved weight": move_the_weight,
    "a number": lambda graph, iteration, x: (x, 2),
    "a number's class": lambda graph, iteration, x: (x, 1.0),
    "the sign of zero": lambda graph, iteration, x: (x, -0.0),
    "structure": lambda graph, iteration, x: (x, [1]),
    "reset": lambda graph, iteration, x: graph.reset() or (x, 1),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_what_makes_another_kind(change, recorders):
    iteration = Linear()
    graph = iteration.graph(num_warmups=1)
    for x in inputs(2, 4, 2):
        iteration.check(graph(x, 0.0 if change is OTHERS["the sign of zero"] else 1), x)
    assert graph.is_captured
    given = change(graph, iteration, x)
    iteration.check(graph(*given), x)
    assert not graph.is_captured
    assert len(recorders) == 2


MODES = {
    "grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_modes_of_autograd_and_autocast_make_another_kind(mode, recorders):
    graph = FullCudaGraph(lambda x: x @ x, [], CPU, num_warmups=1)
    for context in (contextlib.nullcontext, contextlib.nullcontext, mode):
        with context():
            found = graph(torch.eye(2))
    assert not graph.is_captured
    assert found.dtype == (torch.bfloat16 if mode is MODES["autocast"] else torch.float32)


def test_not_a_number_is_no_other_kind(recorders):
    iteration = Linear()
    graph = iteration.graph()
    for x in inputs(4, 4, 2):
        iteration.check(graph(x, math.nan), x)
    assert graph.is_captured


def test_experts_on_one_rank_are_captured(recorders):
    model = gpt(CPU, moe={"num_experts": 4, "top_k": 2})
    batches = torch.randint(V, (4, 2, B, S))

    def iteration(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = model(tokens, labels=labels).mean()
        loss.backward()
        return loss.detach()

    graph = FullCudaGraph(iteration, model.parameters(), CPU)
    for batch in batches:
        model.zero_grad()
        found = [graph(*batch), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
        assert all(map(torch.equal, found, [iteration(*batch), *(parameter.grad for parameter in model.parameters())]))
    assert graph.is_captured


def test_two_graphs_of_one_function_are_independent(recorders):
    iteration = Linear()
    first, second = iteration.graph(num_warmups=1), iteration.graph(num_warmups=1)
    for x in inputs(3, 4, 2):
        iteration.check(first(x), x)
    for x in inputs(1, 4, 2):
        iteration.check(second(x), x)
    assert first.is_captured
    assert not second.is_captured
    iteration.check(first(x + 1.0), x + 1.0)


def test_a_parameter_without_a_gradient_has_none_after_a_replay(recorders):
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def iteration(x: Tensor) -> dict[str, Any]:
        loss = (x * used).sum()
        loss.backward()
        return {"loss": loss, "name": "l2"}

    graph = FullCudaGraph(iteration, [used, unused], CPU, num_warmups=1)
    for x in inputs(3, 2):
        used.grad = None
        found = graph(x)
    torch.testing.assert_close(used.grad, x)
    assert unused.grad is None
    assert found["name"] == "l2"
    assert not found["loss"].requires_grad


def test_an_evaluation_without_gradients_is_captured_too(recorders):
    model = gpt(CPU).eval()
    graph = FullCudaGraph(lambda tokens, labels: model(tokens, labels=labels).sum(), model.parameters(), CPU)
    batches = torch.randint(V, (5, 2, B, S))
    with torch.no_grad():
        found = [graph(*batch) for batch in batches]
        assert found == [model(tokens, labels=labels).sum() for tokens, labels in batches]
    assert graph.is_captured


def test_without_a_gpu_every_call_runs_the_function():
    iteration = Linear()
    graph = iteration.graph()
    for x in inputs(5, 4, 2):
        iteration.check(graph(x), x)
    assert len(iteration.addresses) == 5
    assert not graph.is_captured


def test_inputs_that_change_again_and_again_are_warned_of_once(recorders, caplog):
    iteration = Linear()
    graph = iteration.graph()
    with caplog.at_level(logging.WARNING):
        for rows in range(1, 20):
            for x in inputs(1, rows, 2):
                iteration.check(graph(x), x)
            assert len(caplog.messages) == (rows >= 8)
    assert "have changed shape or value 7 times" in caplog.messages[0]
