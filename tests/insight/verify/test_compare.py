"""Records are compared entry by entry, in the metric of numerics/tolerance.py, however ranks split them."""

import math

import torch

from megalith.insight.verify.compare import errors, expected, first_beyond, merged
from megalith.insight.verify.record import Entry, Key
from megalith.numerics.tolerance import gradient_error

W, B = Key(1, "gradient", "w"), Key(1, "gradient", "b")
MODULE = Key(1, "module", "the output of mlp")
LOSS = Key(1, "loss", "the loss")


def entry(*values: float) -> Entry:
    return Entry(torch.tensor(values, dtype=torch.float64))


def rows(values: list[list[float]], tokens: list[int]) -> Entry:
    return Entry(torch.tensor(values, dtype=torch.float64), torch.tensor(tokens))


def test_an_error_is_that_of_the_promise_over_all_tensors_of_a_kind():
    want = {W: entry(3.0, 4.0), B: entry(0.0), LOSS: entry(100.0)}
    found = errors({W: entry(3.0, 4.5), B: entry(1e-9)}, want, "float64")
    assert found[W] == gradient_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]), 5.0)
    assert found[B] == 1e-9 / (1e-6 * 5.0)


def test_rows_are_compared_by_their_tokens():
    want = {MODULE: rows([[0.0], [1.0], [2.0], [3.0]], [10, 11, 12, 13])}
    assert errors({MODULE: rows([[3.0], [1.0]], [13, 11])}, want, "float64") == {MODULE: 0.0}
    assert errors({MODULE: rows([[3.0], [1.0]], [13, 12])}, want, "float64")[MODULE] > 0.1


def test_nan_another_shape_and_an_unknown_entry_are_as_wrong_as_can_be():
    want = {W: entry(1.0), LOSS: entry(1.0)}
    unknown = Key(1, "gradient", "unknown")
    found = errors(
        {W: entry(math.nan), LOSS: entry(1.0, 1.0), unknown: entry(1.0), MODULE: entry(1.0)}, want, "float64"
    )
    assert found == {W: math.inf, LOSS: math.inf, unknown: math.inf}


def test_the_worst_rank_counts():
    assert merged([{W: 1.0}, {W: 2.0, B: 0.0}, {W: 0.5}]) == {W: 2.0, B: 0.0}


def test_the_first_that_differs_is_the_first_of_one_process():
    found = {LOSS: 1.0, W: 2.0, MODULE: 0.0}
    assert first_beyond(found, [MODULE, B, W, LOSS], 1e-9) == W
    assert first_beyond(found, [MODULE, B], 1e-9) is None
    assert first_beyond({W: math.inf}, [W], 1e-9) == W


def test_modules_may_be_missing_and_in_float32_the_last_weights():
    first, last = Key(0, "weight", "w"), Key(1, "weight", "w")
    keys = [first, MODULE, W, last]
    assert expected(keys, "float64") == [first, W, last]
    assert expected(keys, "float32") == [first, W]
