"""replay: repeated views are taken once, and calls that only look like views are left alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalith.acceleration.replay import Replayed, called_whole
from tests.acceleration.test_replay import PLACES, called, drawn


class Counting(TorchFunctionMode):
    """Records the names of the torch calls that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def views_twice(x: Tensor) -> Tensor:
    x.new_empty(3).view(1, 3)  # unused
    first, _ = x[:, 1:].chunk(2, dim=-1)
    before = first.clone()
    again, other = x[:, 1:].chunk(2, dim=-1)
    again.unsqueeze(0).mul_(other)  # shares memory with the first
    return torch.cat((before, first, again, other[:, 1:], x[:, 1:2]), dim=-1)


def test_a_view_that_is_taken_twice_is_taken_once_and_what_nobody_reads_is_not_made():
    replayed = Replayed(views_twice)
    with torch.no_grad():
        for [x] in drawn(3, (2, 5)):
            want = views_twice(x.clone())
            with Counting() as counting:
                found = replayed(x)
            assert torch.equal(found, want)
    calls = [name for name in counting.names if name not in ("__get__", "stride")]
    assert calls == ["__getitem__", "chunk", "clone", "unsqueeze", "mul_", "__getitem__", "__getitem__", "cat"]


def copies_by_places(x: Tensor) -> Tensor:
    first, second = x[[0, 1]], x[[0, 1]]
    third, fourth = x[PLACES], x[PLACES]
    second.add_(1.0)
    fourth.add_(2.0)
    return torch.stack((first, second, third, fourth))


def takes_another_shape(x: Tensor) -> Tensor:
    first = x[:2]
    first.unsqueeze_(0)
    return first + x[:2].sum(dim=0)


def holds_other_memory(x: Tensor) -> Tensor:
    y = x * 2.0
    first = y[:2].clone()
    y.data = x + 1.0
    return first + y[:2]


def resized_by_a_result(x: Tensor) -> Tensor:
    y = torch.empty(0)
    first = y[:2].sum()
    torch.mul(x, x, out=y.resize_(0))
    return first + y[:2].sum()


@called_whole
def deepened(x: Tensor) -> None:
    x.unsqueeze_(0)


def takes_another_shape_for_a_while(x: Tensor) -> Tensor:
    first = x[:2]
    second = x[:2]
    first.t_()
    product = first @ second
    first.t_()
    return product + first[0, 0]


def takes_another_shape_inside_of_a_whole_call(x: Tensor) -> Tensor:
    y = x * 2.0
    first = y[:2].clone()
    deepened(y)
    return first + y[:2].sum(dim=0)[:2]


INDICES = (np.array([0, 1]), range(2), True)


def copies_by_arrays(x: Tensor) -> Tensor:
    pairs = [(x[index], x[index].add_(1.0)) for index in INDICES]
    return torch.cat([part.flatten() for pair in pairs for part in pair])


def views_by_keyword(x: Tensor) -> Tensor:
    return torch.unsqueeze(input=x, dim=0) + torch.unsqueeze(input=x, dim=0)


@called_whole
def expand(x: Tensor) -> Tensor:
    """Has the name of a view operation, but is not one."""
    return x + 0.0


def calls_whole_what_is_named_as_a_view(x: Tensor) -> Tensor:
    first, second = expand(x), expand(x)
    second.add_(1.0)
    return first * second


@pytest.mark.parametrize(
    "function",
    [
        copies_by_places,
        copies_by_arrays,
        views_by_keyword,
        calls_whole_what_is_named_as_a_view,
        takes_another_shape,
        takes_another_shape_for_a_while,
        takes_another_shape_inside_of_a_whole_call,
        resized_by_a_result,
        holds_other_memory,
    ],
)
def test_what_only_looks_like_the_same_view_is_taken_again(function):
    inputs = drawn(4, (3, 2))
    found, num_runs = called(function, inputs)
    assert num_runs == 2
    for got, given in zip(found, inputs, strict=True):
        assert torch.equal(got, function(*given))
