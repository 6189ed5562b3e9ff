"""recompute: bitwise the same results, computed twice, with only the inputs saved."""

import copy

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput, discard_outputs_, recompute, recompute_modules_
from tests.live_memory import LiveMemory


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
    (only,) = (tensor for tensor in kept if tensor.numel())  # torch before 2.13 also keeps an empty one
    assert only is x
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


class Counted(nn.Module):
    """tanh(x W) / 2, counting its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) / 3.0)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return torch.tanh(x @ self.weight) / 2.0


def test_modules_are_computed_again_and_those_left_out_are_not():
    model = nn.Sequential(Counted(), Counted(), Counted())
    plain = copy.deepcopy(model)
    recompute_modules_(list(model)[1:])
    x = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    y, want = model(x), plain(x)
    assert torch.equal(y, want)
    y.sum().backward()
    want.sum().backward()
    assert [module.num_forwards for module in model] == [1, 2, 2]
    for got, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, other.grad)


def test_names_state_and_hooks_of_recomputed_modules_stay():
    model, calls = nn.Sequential(Counted()), []
    model[0].register_forward_pre_hook(lambda module, args: calls.append("before"))
    model[0].register_forward_hook(lambda module, args, y: calls.append("after"))
    recompute_modules_([model[0]])
    assert model.state_dict().keys() == {"0.weight"}
    y = model(torch.ones(1, 4))
    assert calls == ["before", "after"]
    y.sum().backward()
    assert calls == ["before", "after"], "hooks are around what is computed again"
    assert model[0].num_forwards == 2


def test_torchs_generator_is_left_alone():
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    recompute(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.equal(torch.rand(1), want)


class Chain(nn.Module):
    """tanh, its sine, and three readers of the sine: through a view, in another dtype, and in two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DiscardableOutput("first"), DiscardableOutput("second")
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(self._tanh, x)
        b = self.second(self._sine, a)
        return (b[1:] * b[:-1].t().reshape(b[1:].shape)).sum() + b.float().exp().sum() + (b * b).cos().sum()

    def _tanh(self, x: Tensor) -> Tensor:
        self.calls.append("tanh")
        return torch.tanh(x)

    def _sine(self, a: Tensor) -> Tensor:
        self.calls.append("sine")
        return torch.sin(a)


def chains() -> tuple[Chain, Chain, Tensor]:
    """One module that discards its outputs, one that does not, and their input."""
    discarding = Chain()
    discard_outputs_(discarding, [discarding.first, discarding.second])
    return discarding, Chain(), torch.linspace(-1.0, 1.0, 20, dtype=torch.float64).view(5, 4).requires_grad_()


def test_a_discarded_output_is_computed_again_once_in_each_backward_and_changes_no_bit():
    discarding, plain, x = chains()
    y, want = discarding(x), plain(x)
    assert torch.equal(y, want)
    (expected,) = torch.autograd.grad(want, x)
    # tanh's backward reads its own output, which the next step reads too
    for repetition in (1, 2):
        (dx,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(dx, expected)
        assert discarding.calls.count("sine") == 1 + repetition
    assert plain.calls == ["tanh", "sine"]


def test_a_discarded_output_is_freed_after_forward_and_after_backward():
    model, x = nn.Linear(4, 4, bias=False), torch.ones(1000, 4)
    model.normed = DiscardableOutput("normed")
    model.forward = lambda x: nn.functional.linear(model.normed(nn.functional.relu, x), model.weight)
    discard_outputs_(model, [model.normed])
    with LiveMemory() as memory:
        y = model(x)
        assert memory.alive() == y.nbytes
        loss = y.sum()
        loss.backward(retain_graph=True)
    assert memory.alive() == y.nbytes + loss.nbytes + model.weight.grad.nbytes


def test_without_gradients_or_outside_of_its_layer_nothing_is_discarded():
    discarding, plain, x = chains()
    with torch.no_grad():
        assert torch.equal(discarding(x), plain(x))
    assert torch.equal(discarding.first(torch.exp, x), x.exp())
    assert discarding.calls == ["tanh", "sine"]
