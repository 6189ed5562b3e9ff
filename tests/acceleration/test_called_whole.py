"""called_whole: functions that a replay calls as a whole, with their side effects; if it cannot know, Python runs."""

import copy
from collections import OrderedDict, deque
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megalith.acceleration.replay import called_whole
from tests.acceleration.test_replay import called, drawn


class Counter:
    """A value that changes from call to call."""

    def __init__(self) -> None:
        self.count = 0

    @called_whole
    def next(self, x: Tensor, *, by: int) -> tuple[Tensor, Tensor]:
        self.count += by
        return x + self.count, x[: self.count % 2]


def test_what_is_called_whole_changes_with_each_call():
    counter = Counter()
    found, num_runs = called(lambda x: counter.next(x * 2.0, by=3)[0] + 1.0, [[torch.zeros(1)] for _ in range(5)])
    assert [float(x) for x in found] == [4.0, 7.0, 10.0, 13.0, 16.0]
    assert (num_runs, counter.count) == (2, 15)


def test_what_is_called_whole_is_called_as_it_is_where_nothing_is_recorded():
    counter = Counter()
    total, _ = counter.next(torch.zeros(1), by=1)
    assert float(total) == 1.0


class Pair(NamedTuple):
    """A record of an input and its result."""

    x: Tensor
    twice: Tensor


@pytest.mark.parametrize(
    "packed", [lambda x: {"x": x}, lambda x: [x, x], lambda x: (OrderedDict(x=x),), lambda x: deque([x])]
)
def test_containers_that_a_whole_call_is_given_fall_back_to_python(packed):
    whole = called_whole(lambda parts, *, more: len(parts) + more)
    same = torch.ones(3)  # the same object in both recordings, and not after them
    inputs = [[same], [same], [torch.full((3,), 5.0)], [same]]
    found, num_runs = called(lambda x: whole(packed(x), more=x), inputs)
    assert (num_runs, found[2].tolist()) == (4, [5.0 + len(packed(same))] * 3)


def test_a_dict_that_torch_fills_falls_back_to_python():
    _, num_runs = called(lambda x: copy.deepcopy(x, {}) * 2.0, drawn(4, (3,)))
    assert num_runs == 4


def test_inputs_in_a_tuple_and_by_name_are_those_of_each_call():
    whole = called_whole(lambda parts, **more: parts[0][0] + more["a twice"])
    same = torch.ones(3)
    inputs = [[same], [same], [torch.full((3,), 5.0)]]
    found, num_runs = called(lambda x: whole(((x,),), **{"a twice": x * 2.0}), inputs)
    assert (num_runs, found[-1].tolist()) == (2, [15.0] * 3)


def test_a_whole_call_that_returns_its_input_falls_back_to_python():
    counter = Counter()

    def doubled_later(x: Tensor) -> Tensor:
        counter.count += 1
        return x if counter.count < 3 else x * 2.0

    whole = called_whole(doubled_later)
    found, num_runs = called(lambda x: x + 10.0 * whole(x), [[torch.ones(1)] for _ in range(4)])
    assert ([x.item() for x in found], num_runs) == ([11.0, 11.0, 21.0, 21.0], 4)


def test_a_record_of_one_input_falls_back_to_python():
    whole = called_whole(lambda pair: pair.x + 1.0)
    same = torch.ones(3)
    found, num_runs = called(lambda x: whole(Pair(x, x)), [[same], [same], [torch.full((3,), 5.0)]])
    assert (num_runs, found[-1].tolist()) == (3, [6.0] * 3)


@pytest.mark.parametrize("result", [3, {"x": 1}, "text"])
def test_what_is_called_whole_and_gives_no_tensor_falls_back_to_python(result):
    whole = called_whole(lambda: result)
    _, num_runs = called(lambda x: x + len(str(whole())), drawn(4, (3,)))
    assert num_runs == 4


def test_a_device_that_is_chosen_outside_holds_inside_of_a_whole_call():
    whole = called_whole(lambda: torch.ones(3))
    with torch.device("meta"):
        assert whole().device.type == "meta"
        found, num_runs = called(lambda x: x + whole(), [[torch.ones(3)] for _ in range(4)])
    assert (num_runs, {x.device.type for x in found}) == (2, {"meta"})


def test_whole_calls_inside_of_one_are_part_of_it():
    inner = Counter()
    outer = called_whole(lambda x: inner.next(x, by=1)[0])
    found, num_runs = called(lambda x: outer(x) * 1.0, [[torch.zeros(1)] for _ in range(4)])
    assert ([float(x) for x in found], num_runs, inner.count) == ([1.0, 2.0, 3.0, 4.0], 2, 4)


def test_records_of_tensors_fall_back_to_python():
    total = called_whole(lambda pair: pair.x + pair.twice)
    inputs = drawn(5, (3,))
    found, num_runs = called(lambda x: total(Pair(x, x * 2.0)), inputs)
    assert num_runs == 5
    for got, (x,) in zip(found, inputs, strict=True):
        assert torch.equal(got, x + x * 2.0)


def test_a_number_beside_a_tensor_is_a_value():
    counted = called_whole(lambda x: (x * 2.0, int((x > 0).sum())))

    def scaled(x: Tensor) -> Tensor:
        twice, number = counted(x)
        return twice * number

    inputs = [[torch.tensor([1.0, sign])] for sign in (1.0, 1.0, -1.0, 1.0)]
    found, num_runs = called(scaled, inputs)
    assert num_runs == 4
    assert [x.tolist() for x in found] == [[4.0, 4.0], [4.0, 4.0], [2.0, -2.0], [4.0, 4.0]]


def test_several_results_keep_their_names_inside_of_a_whole_call():
    named = called_whole(lambda pair: pair.values + pair.indices)
    inputs = drawn(4, (5,))
    found, num_runs = called(lambda x: named(x.topk(2)), inputs)
    assert num_runs == 4  # falls back to Python
    for got, (x,) in zip(found, inputs, strict=True):
        assert torch.equal(got, sum(x.topk(2)))


def test_a_record_that_a_whole_call_returns_is_taken_apart():
    whole = called_whole(lambda x: Pair(x + 0.0, x * 2.0))
    found, num_runs = called(lambda x: whole(x).x - whole(x).twice, [[torch.full((1,), n)] for n in (1.0, 2.0, 3.0)])
    assert ([x.item() for x in found], num_runs) == ([-1.0, -2.0, -3.0], 2)
