"""replay: after two calls torch alone is called, and gives what Python gives; where it cannot be, Python is called."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from megalith.acceleration.replay import Replayed, called_whole


def called(function: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], int]:
    """What a ``Replayed`` gives for each of ``inputs``, and how often Python ran."""
    runs: list[int] = []

    def counted(*given: Tensor) -> Tensor:
        runs.append(1)
        return function(*given)

    replayed = Replayed(counted)
    with torch.no_grad():
        return [replayed(*given) for given in inputs], len(runs)


def drawn(num_calls: int, *shapes: tuple[int, ...]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(num_calls)]


PLACES = torch.tensor([2, 0])
WEIGHT = torch.linspace(-1.0, 1.0, 24).view(4, 6)


def linear_and_more(x: Tensor, y: Tensor) -> Tensor:
    wide = torch.nn.functional.linear(x, WEIGHT)  # a weight from outside
    first, second = wide.chunk(2, dim=-1)  # several results
    out = torch.empty(first.shape)
    torch.mul(first, y[:, :2], out=out).addcmul_(second, y[:, 2:], value=-2.0)  # memory that is written
    return torch.cat((out, first.square(), second.t().t()), dim=-1).to(torch.float32)


def writes_through_a_view(x: Tensor) -> Tensor:
    total = x * 2.0
    before = total[0].clone()
    total[0] = 7.0
    total.t()[1].add_(1.0)
    return torch.cat((total[0], before, total[1]))


def several_of_one_call(x: Tensor) -> Tensor:
    values, places = x.topk(2)
    return values * places + x.max(dim=-1, keepdim=True).values


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (linear_and_more, [(3, 6), (3, 4)]),
        (writes_through_a_view, [(2, 3)]),
        (several_of_one_call, [(3, 5)]),
        (lambda x: x, [(2,)]),
        (lambda x, y: torch.stack([y, x]).mT, [(2,), (2,)]),
        (lambda x: x if x.shape[0] == 2 and x.dtype == torch.float32 else x + 1, [(2,)]),
    ],
)
def test_it_gives_the_same_bits_from_the_third_call_on_without_python(function, shapes):
    inputs = drawn(6, *shapes)
    found, num_runs = called(function, inputs)
    assert num_runs == 2
    for got, given in zip(found, inputs, strict=True):
        assert torch.equal(got, function(*given))


def test_inputs_that_were_one_tensor_may_be_two_and_one_that_was_a_weight_another():
    ones, twos = torch.ones(4, 6), torch.full((4, 6), 2.0)
    (*_, found), _ = called(lambda x, y: x - y, [[ones, ones], [ones, ones], [ones, twos]])
    assert torch.equal(found, ones - twos)
    (*_, found), _ = called(lambda x: x * WEIGHT, [[WEIGHT], [WEIGHT], [twos]])
    assert torch.equal(found, twos * WEIGHT)


def test_results_of_other_calls_are_left_alone():
    (first, *_, last), _ = called(lambda x: x * 2.0, [[torch.full((2,), float(place))] for place in range(4)])
    assert (first.tolist(), last.tolist()) == ([0.0, 0.0], [6.0, 6.0])


def test_weights_may_change_in_place():
    weight = torch.ones(3)
    runs: list[int] = []
    replayed = Replayed(lambda x: runs.append(1) or x * weight)
    for value in (1.0, 2.0, 3.0, 4.0):
        weight.fill_(value)
        assert replayed(torch.ones(3)).tolist() == [value] * 3
    assert len(runs) == 2


class Counter:
    """Something that changes from call to call."""

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


def branch_on_a_value(x: Tensor) -> Tensor:
    return x + 1.0 if x[0] > 0 else x - 1.0


def number_of_a_value(x: Tensor) -> Tensor:
    return x * x.sum().item()


def numbers_of_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.numpy() * 2.0)


def lists(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist()) * 2.0


def fixed_shape(found: Tensor) -> Tensor:
    """Calls that are the same for any number of elements."""
    return found.float().sum() * torch.ones(3)


SHAPED_BY_VALUES = {
    "nonzero": lambda x: x.relu().nonzero(),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "where": lambda x: torch.where(x > 0)[0],
    "mask": lambda x: x[x > 0],
    "mask among others": lambda x: torch.stack((x, x))[:, x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: (x > 0).unique(),
    "unique_consecutive": lambda x: (x > 0).unique_consecutive(),
    "bincount": lambda x: torch.bincount((x * 10).abs().long()),
    "one_hot": lambda x: torch.nn.functional.one_hot((x * 10).abs().long()),
    "repeat_interleave": lambda x: x.repeat_interleave((x > 0).long() + 1),
    "combinations": lambda x: torch.combinations(x[x > 0]),
    "tensor_split": lambda x: x.tensor_split((x > 0).sum(0, keepdim=True))[0],
    "slice": lambda x: x[: (x > 0).sum()],
    "narrow": lambda x: x.narrow(0, 0, (x > 0).sum()),
    "select": lambda x: x[(x > 0).sum() - 1],
    "write up to": lambda x: x.clone().__setitem__(slice(0, (x > 0).sum()), 5.0) or x,
    "operator": lambda x: torch.ops.aten.nonzero.default(x.relu()),
    "operator of a mask": lambda x: torch.ops.aten.index.Tensor(x, [x > 0]),
    "a size": lambda x: torch.zeros(2).expand((x > 0).sum() + 1, 2),
    "equal": lambda x: x + torch.equal(x, x.abs()),
}


@pytest.mark.parametrize(
    "function",
    [branch_on_a_value, number_of_a_value, numbers_of_numpy, lists]
    + [pytest.param(lambda x, f=f: fixed_shape(f(x)), id=name) for name, f in SHAPED_BY_VALUES.items()],
)
def test_what_reads_values_is_never_replayed(function):
    inputs = drawn(5, (3,))
    found, num_runs = called(function, inputs)
    assert num_runs == 5
    for got, given in zip(found, inputs, strict=True):
        assert torch.equal(got, function(*given))


def counting() -> Callable[[Tensor], Tensor]:
    steps = iter(range(100))
    return lambda x: x + next(steps)


def growing_rows() -> Callable[[Tensor], Tensor]:
    held = torch.arange(100.0)
    lengths = iter(range(1, 100))
    return lambda x: x + held[: next(lengths)].sum()


def fresh_memory() -> Callable[[Tensor], Tensor]:
    steps = iter(range(100))
    return lambda x: x + torch.from_numpy(np.full(3, next(steps), np.float32))  # not a call that torch tells of


def other_functions() -> Callable[[Tensor], Tensor]:
    steps = iter(range(100))
    return lambda x: torch.sin(x) if next(steps) % 2 else torch.cos(x)


def more_calls() -> Callable[[Tensor], Tensor]:
    steps = iter(range(100))
    return lambda x: sum((x for _ in range(next(steps))), x)


@pytest.mark.parametrize("made", [counting, growing_rows, fresh_memory, other_functions, more_calls])
def test_what_differs_between_two_calls_is_never_replayed(made):
    inputs = drawn(5, (3,))
    found, num_runs = called(made(), inputs)
    assert num_runs == 5
    function = made()
    for got, given in zip(found, inputs, strict=True):
        assert torch.equal(got, function(*given))


def test_inputs_of_other_shapes_fall_back_to_python():
    inputs = [[torch.ones(size)] for size in (1, 2, 2, 2, 3, 2)]
    found, num_runs = called(lambda x: x * len(x), inputs)
    assert [x.tolist() for x in found] == [[1.0], [2.0] * 2, [2.0] * 2, [2.0] * 2, [3.0] * 3, [2.0] * 2]
    assert num_runs == 4  # of one, twice of two, of three


class Pair(NamedTuple):
    """A record of an input and what was made of it."""

    x: Tensor
    twice: Tensor


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[PLACES] * x[:, None].mT[0, [1]],
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x.tensor_split([1, 2])[1],
        lambda x: torch.cat([*x.split(1)[::2], x.unsqueeze(0)[..., 1]]),
        lambda x: torch.empty(3).random_(**{"from": 2, "to": 3}) * x,  # a name that is a word of Python
    ],
)
def test_places_and_numbers_are_no_values(function):
    inputs = drawn(5, (3,))
    found, num_runs = called(function, inputs)
    assert num_runs == 2
    for got, given in zip(found, inputs, strict=True):
        assert torch.equal(got, function(*given))


def of_parts(parts: dict[str, list[Tensor]], *, more: dict[str, Tensor]) -> Tensor:
    return parts["x"][0] + more["twice"]


def test_an_input_inside_of_a_dict_is_that_of_each_call():
    whole = called_whole(of_parts)
    same = torch.ones(3)  # one object in both recordings, and not after them
    inputs = [[same], [same], [torch.full((3,), 5.0)]]
    found, num_runs = called(lambda x: whole({"x": [x]}, more={"twice": x * 2.0}), inputs)
    assert (num_runs, found[-1].tolist()) == (2, [15.0] * 3)


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


@pytest.mark.parametrize("other", [torch.ones(3, dtype=torch.float64), torch.ones(6)[::2]])
def test_inputs_of_another_dtype_or_stride_fall_back_to_python(other):
    inputs = [[torch.ones(3)], [torch.ones(3)], [other], [torch.ones(3)]]
    found, num_runs = called(lambda x: x * x.stride(0) if x.dtype == torch.float32 else x * 5.0, inputs)
    assert num_runs == 3
    assert found[2].tolist() == ([5.0] * 3 if other.dtype == torch.float64 else [2.0] * 3)


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


def test_lists_that_a_whole_call_is_given_are_those_of_each_call():
    lengths, runs = [1.0], []
    whole = called_whole(lambda by, x: x * by[0])
    replayed = Replayed(lambda x: runs.append(1) or whole(lengths, x))
    found = []
    for lengths[0] in (2.0, 3.0, 4.0, 5.0):
        found.append(replayed(torch.ones(1)).item())
    assert (found, len(runs)) == ([2.0, 3.0, 4.0, 5.0], 2)


def test_lists_that_are_made_anew_for_a_whole_call_fall_back_to_python():
    whole = called_whole(lambda by, x: x * len(by))

    def changes_its_list(x: Tensor) -> Tensor:
        by = [1, 2]
        twice = whole(by, x)
        by.append(3)
        return twice

    found, num_runs = called(changes_its_list, [[torch.ones(1)] for _ in range(4)])
    assert ([x.item() for x in found], num_runs) == ([2.0] * 4, 4)


def test_several_results_keep_their_names_inside_of_a_whole_call():
    named = called_whole(lambda pair: pair.values + pair.indices)
    inputs = drawn(4, (5,))
    found, num_runs = called(lambda x: named(x.topk(2)), inputs)
    assert num_runs == 4  # falls back to Python
    for got, (x,) in zip(found, inputs, strict=True):
        assert torch.equal(got, sum(x.topk(2)))


def test_a_record_that_a_whole_call_returns_is_taken_apart():
    whole = called_whole(lambda x: Pair(x, x * 2.0))
    found, num_runs = called(lambda x: whole(x).x - whole(x).twice, [[torch.full((1,), n)] for n in (1.0, 2.0, 3.0)])
    assert ([x.item() for x in found], num_runs) == ([-1.0, -2.0, -3.0], 2)


def test_inputs_on_another_device_fall_back_to_python():
    inputs = [torch.ones(2), torch.ones(2), torch.ones(2, device="meta"), torch.ones(2)]
    found, num_runs = called(lambda x: x + torch.ones(2, device=x.device), [[x] for x in inputs])
    assert ([x.device.type for x in found], num_runs) == (["cpu", "cpu", "meta", "cpu"], 3)


def test_under_another_autocast_or_default_dtype_python_is_called():
    replayed = Replayed(lambda x: torch.mm(x, x) + torch.ones(1))
    x = torch.eye(2)
    for _ in range(3):
        assert replayed(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(x, x).dtype == torch.bfloat16
        assert replayed(x).dtype == torch.float32  # one addend is
        assert Replayed(lambda x: torch.mm(x, x))(x).dtype == torch.bfloat16
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert replayed(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_a_zero_of_another_sign_is_another_number():
    signs = iter([0.0, -0.0, 0.0, 0.0])
    found, num_runs = called(lambda x: torch.copysign(x, next(signs)), [[torch.ones(1)] for _ in range(4)])
    assert ([x.item() for x in found], num_runs) == ([1.0, -1.0, 1.0, 1.0], 4)


def test_inputs_of_ever_other_shapes_are_recorded_a_few_times_and_then_left_to_python():
    inputs = [[torch.ones(1 + place % 2)] for place in range(20)]
    modes: list[int] = []

    def function(x: Tensor) -> Tensor:
        modes.append(len(_get_current_function_mode_stack()))
        return x + 1.0

    _, num_runs = called(function, inputs)
    assert num_runs == 20
    assert modes == [1] * 8 + [0] * 12
