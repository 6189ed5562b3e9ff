"""Launchers make the GPU of their tensors the current one; tested with fake tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith.fusions.core.devices import has_large_memory, is_hopper
from megalith.fusions.core.registration import Operator, register_without_gradient

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch 2.11 initializes the GPU of a fake tensor")


def on(device: str) -> Tensor:
    with FakeTensorMode():
        return torch.empty(3, device=device)


@pytest.fixture
def current(monkeypatch) -> list[int]:
    """The stack of current GPUs, starting with 0; restored devices are pushed as well, so it is also the history."""
    stack = [0]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        stack.append(wanted.index)
        yield
        stack.append(0)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: stack[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


launched_on: list[int] = []


def launch(x: Tensor, others: list[Tensor]) -> Tensor:
    launched_on.append(torch.cuda.current_device())
    return x


def launch_back(dy: Tensor, x: Tensor) -> tuple[Tensor]:
    launched_on.append(torch.cuda.current_device())
    return (dy,)


def launch_of_list(xs: list[Tensor]) -> Tensor:
    launched_on.append(torch.cuda.current_device())
    return xs[0]


def outputs(x: Tensor, others: list[Tensor]) -> Tensor:
    return torch.empty_like(x)


def outputs_of_list(xs: list[Tensor]) -> Tensor:
    return torch.empty_like(xs[0])


def gradients(dy: Tensor, x: Tensor) -> tuple[Tensor]:
    return (torch.empty_like(x),)


DIFFERENTIABLE = Operator(outputs, gradients, ("x",), saves=lambda _, x, others: (x,)).register(
    "test_devices", launch, launch_back
)
OF_LIST = register_without_gradient("test_devices_of_list", launch_of_list, outputs_of_list)


def launched(function, *inputs) -> int:
    launched_on.clear()
    function(*inputs)
    return launched_on.pop()


@needs_no_gpu
def test_forward_backward_and_lists_of_tensors_launch_on_the_gpu_of_their_tensors(current):
    x = on("cuda:1")
    assert launched(DIFFERENTIABLE.implementation, x, []) == 1
    assert launched(DIFFERENTIABLE.back.implementation, x, x) == 1
    assert launched(OF_LIST.implementation, [x, x]) == 1
    assert current[-1] == 0


def test_the_current_gpu_is_left_alone_where_the_tensors_are_on_it_or_on_none(current):
    for device in ("cuda:0", "cpu"):
        assert launched(DIFFERENTIABLE.implementation, on(device), []) == 0
    assert launched(OF_LIST.implementation, [torch.ones(3)]) == 0
    assert current == [0]


@needs_no_gpu
def test_tensors_of_a_trace_initialize_no_cuda(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: asked.append("current device") or 0)
    DIFFERENTIABLE.back.implementation(on("cuda:1"), on("cuda:1"))
    assert asked == ["current device"]  # by the launcher itself


@pytest.mark.parametrize(
    ("kibibytes", "hip", "initialized", "is_large"),
    [(227, None, True, True), (163, None, True, False), (227, "6.4", True, False), (227, None, False, False)],
)
def test_large_memory_is_that_of_an_h100_and_a_trace_has_none(kibibytes, hip, initialized, is_large, monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=kibibytes << 10)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_large_memory(on("cuda:0")) is is_large
    assert has_large_memory(on("cpu")) is False


@pytest.mark.parametrize(
    ("capability", "hip", "initialized", "expected"),
    [
        ((9, 0), None, True, True),
        ((8, 0), None, True, False),
        ((10, 0), None, True, False),
        ((9, 0), "7.0", True, False),
        ((9, 0), None, False, False),
    ],
)
def test_hopper_is_an_nvidia_gpu_that_is_there(capability, hip, initialized, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert is_hopper(torch.device("cuda", 0)) is expected
    assert is_hopper(torch.device("cpu")) is False


def test_torch_compile_takes_a_query_of_the_device_as_constant():
    doubled = torch.compile(lambda x: x if is_hopper(x.device) else 2 * x, fullgraph=True, backend="eager")
    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
