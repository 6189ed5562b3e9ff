"""replay: after two calls, only torch is called, with the same results; where that is impossible, Python is called."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from megalith.acceleration.replay import Replayed


def called(function: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], int]:
    """The results of a ``Replayed`` for each of ``inputs``, and how often Python ran."""
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
    torch.mul(first, y[:, :2], out=out).addcmul_(second, y[:, 2:], value=-2.0)  # memory that is written to
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


def branch_on_a_value(x: Tensor) -> Tensor:
    return x + 1.0 if x[0] > 0 else x - 1.0


def number_of_a_value(x: Tensor) -> Tensor:
    return x * x.sum().item()


def numbers_of_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.numpy() * 2.0)


def lists(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist()) * 2.0


def fixed_shape(found: Tensor) -> Tensor:
    """Operations that are the same for any number of elements."""
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
    return lambda x: x + torch.from_numpy(np.full(3, next(steps), np.float32))  # not a call that torch reports


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[PLACES] * x[:, None].mT[0, [1]],
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x.tensor_split([1, 2])[1],
        lambda x: torch.cat([*x.split(1)[::2], x.unsqueeze(0)[..., 1]]),
        lambda x: torch.empty(3).random_(**{"from": 2, "to": 3}) * x,  # a name that is a Python keyword
    ],
)
def test_places_and_numbers_are_no_values(function):
    inputs = drawn(5, (3,))
    found, num_runs = called(function, inputs)
    assert num_runs == 2
    for got, given in zip(found, inputs, strict=True):
        assert torch.equal(got, function(*given))


class Subclass(torch.Tensor):
    """A tensor that torch treats as a different one."""


@pytest.mark.parametrize(
    ("other", "want"),
    [
        (torch.ones(3, dtype=torch.float64), 5.0),
        (torch.ones(6)[::2], 2.0),
        (torch.ones(3).as_subclass(Subclass), 7.0),
        (torch.ones(3).to_sparse(), 5.0),
    ],
    ids=["dtype", "stride", "class", "layout"],
)
def test_inputs_of_another_kind_fall_back_to_python(other, want):
    def scaled(x: Tensor) -> Tensor:
        if type(x) is Subclass:
            return x * 7.0
        return x * x.stride(0) if x.dtype == torch.float32 and x.layout == torch.strided else x * 5.0

    found, num_runs = called(scaled, [[torch.ones(3)], [torch.ones(3)], [other], [torch.ones(3)]])
    assert num_runs == 3
    assert found[2].to_dense().tolist() == [want] * 3


def test_where_an_input_begins_in_memory_is_read_as_a_value_is():
    memory = torch.ones(4)
    found, num_runs = called(lambda x: x * x.storage_offset(), [[memory[place:][:1]] for place in range(4)])
    assert ([x.item() for x in found], num_runs) == ([0.0, 1.0, 2.0, 3.0], 4)


def test_inputs_on_another_device_fall_back_to_python():
    inputs = [torch.ones(2), torch.ones(2), torch.ones(2, device="meta"), torch.ones(2)]
    found, num_runs = called(lambda x: x + torch.ones(2, device=x.device), [[x] for x in inputs])
    assert ([x.device.type for x in found], num_runs) == (["cpu", "cpu", "meta", "cpu"], 3)


def test_under_another_autocast_or_default_dtype_python_is_called():
    runs: list[int] = []
    replayed = Replayed(lambda x: runs.append(1) or torch.mm(x, x).float() * torch.full((1,), 2.0).to(x.dtype))
    x = torch.full((1, 1), 1.001)  # bfloat16 rounds it to 1.0
    before = torch.get_default_dtype()
    try:
        for dtype, autocast, want in [(before, False, 1.002001)] * 3 + [
            (before, True, 1.0),
            (torch.float64, False, 1.002001),
        ]:
            torch.set_default_dtype(dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert replayed(x).item() == pytest.approx(2.0 * want, rel=1e-6)
    finally:
        torch.set_default_dtype(before)
    assert len(runs) == 4


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
