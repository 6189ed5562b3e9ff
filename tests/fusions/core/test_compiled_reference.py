"""A compiled reference behaves in autograd like the reference: twice, under checkpoints, with hooks."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megalith.fusions.core.dispatch import compiled


def formula(x: Tensor) -> Tensor:
    return torch.softmax(x.square(), dim=-1).log()


COMPILED = compiled(formula)


def leaf(device: str) -> Tensor:
    return torch.linspace(-1.0, 2.0, 15, device=device).view(3, 5).requires_grad_()


def gradient(y: Tensor, x: Tensor, *, retain_graph: bool = False) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, y.detach().cos(), retain_graph=retain_graph)
    return dx


def test_its_backward_can_run_twice(device):
    x = leaf(device)
    y = COMPILED(x)
    once = gradient(y, x, retain_graph=True)
    assert torch.equal(gradient(y, x), once)
    torch.testing.assert_close(once, gradient(formula(x), x))


def test_a_backward_that_does_not_retain_the_graph_frees_what_was_saved(device):
    x = leaf(device)
    for retained in (True, False):
        h = x.exp()
        saved, y = StorageWeakRef(h.untyped_storage()), COMPILED(h)
        del h
        assert not saved.expired()
        gradient(y, x, retain_graph=retained)
        assert saved.expired() != retained


def test_inside_of_a_checkpoint_it_keeps_nothing_and_is_computed_again(device):
    x, inputs = leaf(device), []

    def region(x: Tensor) -> Tensor:
        h = x.exp()
        inputs.append(StorageWeakRef(h.untyped_storage()))
        return COMPILED(h).sin()

    y = checkpoint(region, x, use_reentrant=False)
    assert [ref.expired() for ref in inputs] == [True]
    got = gradient(y, x)
    assert len(inputs) == 2
    assert inputs[1].expired()
    torch.testing.assert_close(got, gradient(formula(x.exp()).sin(), x))


def test_a_hook_of_its_input_sees_the_gradient_once(device):
    def doubled(compute: object) -> Tensor:
        x = leaf(device)
        h = x.exp()
        h.register_hook(lambda g: 2.0 * g)
        x.register_hook(lambda g: g + 1.0)
        return gradient(compute(h), x)

    torch.testing.assert_close(doubled(COMPILED), doubled(formula))
