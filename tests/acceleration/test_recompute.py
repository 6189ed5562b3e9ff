"""recompute: the same bits, computed twice, with nothing kept but the inputs."""

import torch
from torch import Tensor

from megalith.acceleration.recompute import recompute


def test_it_runs_the_function_again_in_backward_and_changes_no_bit():
    calls = []

    def function(x: Tensor, factor: float) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return (torch.sin(x) * factor).exp()

    x = torch.linspace(-1.0, 1.0, 12, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = recompute(function, x, 3.0)
    assert len(calls) == 1
    assert all(tensor is x for tensor in kept)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert len(calls) == 2
    want = function(x, 3.0)
    assert torch.equal(y, want)
    assert torch.equal(dx, torch.autograd.grad(want.sum(), x)[0])


def test_without_gradients_it_runs_once():
    calls = []
    with torch.no_grad():
        y = recompute(lambda x: calls.append(None) or x * 2.0, torch.ones(3, requires_grad=True))
    assert not y.requires_grad
    assert len(calls) == 1


def test_torchs_generator_is_left_alone():
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    recompute(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.equal(torch.rand(1), want)
