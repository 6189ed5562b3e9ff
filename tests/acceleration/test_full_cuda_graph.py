"""FullCudaGraph against eager iterations: on a CPU by repeating operators, on a GPU by a real graph."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.acceleration import full_cuda_graph
from megalith.acceleration.full_cuda_graph import FullCudaGraph
from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import DropoutKey
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.acceleration.operator_recorder import OperatorRecorder

CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(torch.device("cuda"), id="cuda", marks=NEEDS_GPU)]
V, S, B = 97, 32, 2


@pytest.fixture
def recorders(monkeypatch) -> list[OperatorRecorder]:
    """The recorders of all graphs on the CPU."""
    made: list[OperatorRecorder] = []
    real = full_cuda_graph._recorder_on

    def recorder_on(device: torch.device) -> full_cuda_graph.Recorder | None:
        if device.type != "cpu":
            return real(device)
        made.append(OperatorRecorder())
        return made[-1]

    monkeypatch.setattr(full_cuda_graph, "_recorder_on", recorder_on)
    return made


class Linear:
    """An iteration of ``x @ weight``, which counts how often its Python runs and where its input is."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.weight = nn.Parameter(torch.arange(6.0, device=device).view(2, 3) + 1.0)
        self.addresses: list[int] = []

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        self.addresses.append(x.data_ptr())
        y = (x @ self.weight).square().sum()
        y.backward()
        return y

    def graph(self, **kwargs: Any) -> FullCudaGraph:
        return FullCudaGraph(self, [self.weight], self.weight.device, **kwargs)

    def check(self, found: Tensor, x: Tensor) -> None:
        """Checks the result and the gradient for ``x``, and drops the gradient."""
        y = x @ self.weight.detach()
        torch.testing.assert_close(found, y.square().sum())
        torch.testing.assert_close(self.weight.grad, 2 * x.t() @ y)
        self.weight.grad = None


def inputs(num: int, *shape: int, device: torch.device = CPU) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator).to(device) for _ in range(num))


def gpt(device: torch.device, dropout: float = 0.0) -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=V, ffn_hidden_size=48, hidden_dropout=dropout
    )
    torch.manual_seed(0)
    with torch.device(device):
        return GPTModel(config, BuildOptions(ProcessGroupCollection.single(), torch.float32))


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


def change_dtype(graph: FullCudaGraph, iteration: Linear, x: Tensor) -> tuple[Any, ...]:
    iteration.weight.data = iteration.weight.data.double()
    return (x.double(),)


def move_the_weight(graph: FullCudaGraph, iteration: Linear, x: Tensor) -> tuple[Any, ...]:
    iteration.weight.data = iteration.weight.data + 1.0
    return (x,)


OTHERS = {
    "dtype": change_dtype,
    "a moved weight": move_the_weight,
    "a number": lambda graph, iteration, x: (x, 2),
    "a number's class": lambda graph, iteration, x: (x, 1.0),
    "structure": lambda graph, iteration, x: (x, [1]),
    "reset": lambda graph, iteration, x: graph.reset() or (x, 1),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_what_makes_another_kind(change, recorders):
    iteration = Linear()
    graph = iteration.graph(num_warmups=1)
    for x in inputs(2, 4, 2):
        iteration.check(graph(x, 1), x)
    given = change(graph, iteration, x)
    iteration.check(graph(*given), given[0])
    assert not graph.is_captured
    assert len(recorders) == 2


@pytest.mark.parametrize(
    "mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["grad", "autocast"]
)
def test_modes_of_autograd_and_autocast_make_another_kind(mode, recorders):
    graph = FullCudaGraph(lambda x: x @ x, [], CPU, num_warmups=1)
    for context in (contextlib.nullcontext, contextlib.nullcontext, mode):
        with context():
            found = graph(torch.eye(2))
    assert not graph.is_captured
    assert found.dtype == (torch.float32 if mode is torch.no_grad else torch.bfloat16)


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


def test_gradients_left_from_another_iteration_are_refused(recorders):
    iteration = Linear()
    graph = iteration.graph()
    [x] = inputs(1, 4, 2)
    graph(x)
    before = iteration.weight.grad.clone()
    with pytest.raises(ConfigError, match=r"call zero_grad\(set_to_none=True\) first"):
        graph(x)
    assert torch.equal(iteration.weight.grad, before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_read_in_python_is_refused_with_the_reason_and_nothing_is_left_behind(device, recorders):
    iteration = Linear(device)

    def reads(x: Tensor) -> Tensor:
        loss = iteration(x)
        return loss if loss.item() > 0 else -loss

    graph = FullCudaGraph(reads, [iteration.weight], device, num_warmups=1)
    for x in inputs(2, 4, 2, device=device):
        if graph._num_runs == 0:
            iteration.check(graph(x), x)
            continue
        with pytest.raises(ConfigError, match=r"cannot be captured .*not permitted when stream is capturing; it must"):
            graph(x)
    assert iteration.weight.grad is None
    assert not graph.is_captured
    iteration.check(graph(x), x)  # as at first


@NEEDS_GPU
def test_dropout_refuses_to_be_captured():
    device = torch.device("cuda")
    model = gpt(device, dropout=0.1)

    def iteration(tokens: Tensor) -> Tensor:
        token_ids = torch.arange(B * S, device=device).view(B, S)
        return model(tokens, labels=tokens, dropout_key=DropoutKey(0, 0, token_ids)).sum().backward()

    graph = FullCudaGraph(iteration, model.parameters(), device, num_warmups=1)
    tokens = torch.randint(V, (B, S))
    graph(tokens)
    model.zero_grad()
    with pytest.raises(ConfigError, match="every replay would drop the elements"):
        graph(tokens)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes"], ids=["set", "object", "bytes"])
def test_inputs_that_may_hold_tensors_out_of_sight_are_refused(value, recorders):
    with pytest.raises(ConfigError, match=f"got {type(value).__name__}; pass its tensors"):
        Linear().graph()(torch.ones(4, 2), value)


def test_a_capture_without_a_call_before_is_refused():
    with pytest.raises(ConfigError, match="num_warmups must be at least 1"):
        Linear().graph(num_warmups=0)


def test_inputs_that_change_again_and_again_are_warned_of_once(recorders, caplog):
    iteration = Linear()
    graph = iteration.graph()
    with caplog.at_level(logging.WARNING):
        for rows in range(1, 20):
            for x in inputs(1, rows, 2):
                iteration.check(graph(x), x)
            assert len(caplog.messages) == (rows >= 8)
    assert "have changed shape or value 7 times" in caplog.messages[0]
