"""Blocks of rows: complete results for any block size, sums over all rows, rows as wide as the formula needs."""

import pytest
import torch
from torch import Tensor

from megalith.fusions.core import blocks
from megalith.fusions.core.blocks import by_blocks, widened_by_blocks


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(blocks, "_THREAD_ELEMENTS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_blocks_are_as_many_elements_a_thread_and_one_row_at_least():
    assert [(block.start, block.stop) for block in blocks.blocks(7, 4)] == [(0, 4), (4, 7)]
    assert [(block.start, block.stop) for block in blocks.blocks(2, 1000)] == [(0, 1), (1, 2)]
    assert list(blocks.blocks(0, 4)) == []


def test_a_formula_fills_outputs_and_adds_up_sums():
    x, shift = torch.randn(11, 4), torch.randn(11, 1)
    y, total = torch.empty(11, 4), torch.zeros(4)
    seen = []

    def formula(x: Tensor, absent: None, shift: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((len(x), absent))
        return x + shift, x.sum(dim=0)

    by_blocks(formula, (x, None, shift), (y,), (total,))
    assert seen == [(4, None), (4, None), (3, None)]
    assert torch.equal(y, x + shift)
    torch.testing.assert_close(total, x.sum(dim=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_of_a_sum_are_those_before_rounding(dtype):
    x = torch.randn(11, 3, 5).to(dtype)
    y, total = torch.empty_like(x), torch.zeros(5)

    def formula(x: Tensor, out: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        y = torch.mul(x, 1.01, out=out[0])
        return y, y

    terms = x.float() * 1.01
    widened_by_blocks(formula, (x,), (y,), (total,), acc=torch.float32)
    assert torch.equal(y, terms.to(dtype))
    torch.testing.assert_close(total, terms.sum(dim=(0, 1)), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_floats_come_widened_and_results_go_where_they_belong(dtype):
    x, index = torch.randn(11, 4).to(dtype), torch.arange(11)
    given = x.clone()
    y, wide = torch.empty(11, 4, dtype=dtype), torch.empty(11, 4)
    targets = []

    def formula(x: Tensor, index: Tensor, out: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        assert (x.dtype, index.dtype) == (torch.float32, torch.int64)
        targets.append([target is not None for target in out])
        return torch.mul(x, 2.0, out=out[0]), torch.add(x, index[:, None], out=out[1])

    widened_by_blocks(formula, (x, index), (y, wide), acc=torch.float32)
    assert targets == 3 * [[dtype == torch.float32, True]]
    assert torch.equal(y, (given.float() * 2.0).to(dtype))
    assert torch.equal(wide, given.float() + index[:, None])
    assert torch.equal(x, given)


def test_no_rows_are_no_blocks():
    def formula(*_: object) -> tuple[Tensor]:
        raise AssertionError("there is nothing to compute")

    widened_by_blocks(formula, (torch.empty(0, 4, dtype=torch.bfloat16),), (torch.empty(0, 4),), acc=torch.float32)
