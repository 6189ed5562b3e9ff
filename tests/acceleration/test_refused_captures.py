"""FullCudaGraph: what it refuses, with the way out, and the errors of the function and of a failed capture."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from megalith.acceleration import full_cuda_graph
from megalith.acceleration.full_cuda_graph import FullCudaGraph
from megalith.errors import ConfigError
from megalith.numerics.dropout import DropoutKey
from tests.acceleration.iterations import CPU, DEVICES, NEEDS_GPU, B, Linear, S, V, gpt, inputs
from tests.acceleration.operator_recorder import OperatorRecorder


def test_autocast_around_an_iteration_is_refused_because_it_keeps_old_weights(recorders):
    weight, autocast = torch.ones(2, 2), torch.autocast("cpu", torch.bfloat16)
    inside = FullCudaGraph(autocast(lambda x: x @ weight), [], CPU, num_warmups=1)
    outside = FullCudaGraph(lambda x: x @ weight, [], CPU)
    with autocast, pytest.raises(ConfigError, match="enter autocast inside the function, or with cache_enabled=False"):
        outside(torch.eye(2))
    for _ in range(3):
        weight.mul_(3.0)
        found = inside(torch.eye(2))
    assert torch.equal(found, weight.bfloat16())


def test_an_input_that_requires_a_gradient_is_refused(recorders):
    x = torch.ones(4, 2, requires_grad=True)
    with pytest.raises(ConfigError, match=r"pass x\.detach\(\)"):
        Linear().graph()(x)
    graph = FullCudaGraph(lambda x: 2.0 * x, [], CPU)
    with torch.no_grad():
        assert torch.equal(graph(x), 2.0 * x)


def test_gradients_left_from_another_iteration_are_refused(recorders):
    iteration = Linear()
    graph = iteration.graph()
    [x] = inputs(1, 4, 2)
    graph(x)
    before = iteration.weight.grad.clone()
    with pytest.raises(ConfigError, match=r"call zero_grad\(set_to_none=True\) first"):
        graph(x)
    assert torch.equal(iteration.weight.grad, before)


READS = {
    "item": lambda loss: loss if loss.item() > 0 else -loss,
    "nonzero": lambda loss: loss.view(1).nonzero(),
    "a mask": lambda loss: loss.view(1)[loss.view(1) > 0],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_a_value_read_in_python_is_refused_with_the_reason_and_the_next_call_is_as_the_first(device, read, recorders):
    iteration = Linear(device)
    graph = FullCudaGraph(lambda x: read(iteration(x)), [iteration.weight], device, num_warmups=1)
    x, other = inputs(2, 4, 2, device=device)
    for _ in range(2):
        graph(x)
        iteration.weight.grad = None
        with pytest.raises(ConfigError, match=r"cannot be captured .*not permitted when stream is capturing; it must"):
            graph(other)
        assert iteration.weight.grad is None
        assert not graph.is_captured
    if device != CPU:
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


ERRORS = [RuntimeError(), torch.OutOfMemoryError("no memory"), ConfigError("another"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
def test_other_errors_of_the_function_stay_what_they_are(error, recorders):
    weight, calls = nn.Parameter(torch.ones(2)), iter([False, True])

    def iteration(x: Tensor) -> None:
        (x * weight).sum().backward()
        if next(calls):
            raise error

    graph = FullCudaGraph(iteration, [weight], CPU, num_warmups=1)
    graph(torch.ones(2))
    weight.grad = None
    with pytest.raises(type(error)) as raised:
        graph(torch.ones(2))
    assert raised.value is error
    assert weight.grad is None
    assert not graph.is_captured


def test_an_error_keeps_its_cause_even_if_ending_the_capture_fails_too(recorders, monkeypatch):
    def capture(self: OperatorRecorder, function: Callable[[], object]) -> None:
        try:
            function()
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def iteration(x: Tensor) -> Tensor:
        if next(calls):
            raise ValueError("of the user") from KeyError("cause")
        return x + 1.0

    calls = iter([False, True])
    graph = FullCudaGraph(iteration, [], CPU, num_warmups=1)
    graph(torch.ones(2))
    monkeypatch.setattr(OperatorRecorder, "capture", capture)
    with pytest.raises(ValueError, match="of the user") as raised:
        graph(torch.ones(2))
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_warm_up_that_fails_does_not_count(recorders):
    calls = iter([True, False, False])

    def iteration(x: Tensor) -> Tensor:
        if next(calls):
            raise ValueError("at first")
        return x + 1.0

    graph = FullCudaGraph(iteration, [], CPU, num_warmups=1)
    with pytest.raises(ValueError, match="at first"):
        graph(torch.ones(2))
    graph(torch.ones(2))
    assert not graph.is_captured


class FakeCuda:
    """What a recorder uses of ``torch.cuda``, with a log of how streams wait and which one is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.log = self.Stream(self, "main"), []
        functions = {"Stream": lambda _: self.Stream(self, "own"), "current_stream": lambda _: self.current}
        contexts = {"stream": self.stream, "graph": self.graph, "device": lambda _: contextlib.nullcontext()}
        for name, value in {**functions, **contexts, "CUDAGraph": object}.items():
            monkeypatch.setattr(torch.cuda, name, value)

    class Stream:
        def __init__(self, cuda: "FakeCuda", name: str) -> None:
            self.cuda, self.name = cuda, name

        def wait_stream(self, other: "FakeCuda.Stream") -> None:
            self.cuda.log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        """Like torch's, it stays on its stream if the capture fails."""
        before, self.current = self.current, stream
        yield
        self.current = before


def test_warm_ups_wait_for_the_current_stream_which_is_current_again_after_a_failed_capture(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    main = cuda.current
    recorder = full_cuda_graph._CudaRecorder(torch.device("cuda"))
    recorder.warm_up(lambda: cuda.log.append(f"runs on {cuda.current.name}"))
    assert cuda.log == ["own waits for main", "runs on own", "main waits for own"]
    assert cuda.current is main
    with pytest.raises(RuntimeError, match="own"):
        recorder.capture(lambda: (_ for _ in ()).throw(RuntimeError(cuda.current.name)))
    assert cuda.current is main


@NEEDS_GPU
def test_dropout_refuses_to_be_captured():
    device = torch.device("cuda")
    model = gpt(device, hidden_dropout=0.1)

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


def test_a_capture_without_a_call_before_is_refused_and_so_is_another_device():
    with pytest.raises(ConfigError, match="num_warmups must be at least 1"):
        Linear().graph(num_warmups=0)
    with pytest.raises(ConfigError, match="device must be a CPU or a GPU that torch calls cuda; got meta"):
        FullCudaGraph(lambda: None, [], torch.device("meta"))
