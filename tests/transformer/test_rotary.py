"""rotary: complex numbers turned by their position, whatever the tables' layout."""

import pytest
import torch
from torch import Tensor

from megalith.fusions import fused_rope
from megalith.transformer.rotary import RotaryTable, rotary_table

S, B, A, D = 7, 2, 3, 8
EXACT = 1e-14


def x_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(S, B, A, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def turned(x: Tensor, table: RotaryTable) -> Tensor:
    return fused_rope(x, None, *table)[0]


def by_complex_numbers(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Features i and i + D/2 are one complex number, turned by positions[b, s] * base^(-2i / D)."""
    half = x.shape[-1] // 2
    number = torch.complex(x[..., :half], x[..., half:])
    frequency = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), positions.t()[..., None, None].double() * frequency)
    turned = number * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_features_turn_as_complex_numbers(base):
    positions = torch.arange(S)
    got = turned(x_of(), rotary_table(positions, D, base, torch.float64))
    want = by_complex_numbers(x_of(), positions.expand(B, S), base)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_rows_may_have_positions_of_their_own():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11]])
    got = turned(x_of(), rotary_table(positions, D, 100.0, torch.float64))
    torch.testing.assert_close(got, by_complex_numbers(x_of(), positions, 100.0), rtol=EXACT, atol=EXACT)


def test_a_score_depends_on_the_distance_alone():
    q, k = x_of()[0, 0, 0], x_of()[1, 0, 0]

    def score(query_position: int, key_position: int) -> float:
        table = rotary_table(torch.tensor([query_position, key_position]), D, 10000.0, torch.float64)
        y = turned(torch.stack((q, k)).view(2, 1, 1, D), table)
        return float(y[0, 0, 0] @ y[1, 0, 0])

    assert score(5, 2) == pytest.approx(score(1003, 1000), abs=1e-12)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_position_0_and_lengths_stay():
    table = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
    y = turned(x_of(), table)
    assert torch.equal(y[0], x_of()[0])
    torch.testing.assert_close(y.norm(dim=-1), x_of().norm(dim=-1), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_features_are_turned_in_float32_and_rounded_once(dtype):
    table = rotary_table(torch.arange(S), D, 10000.0, dtype)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    assert table.cos.shape == (S, D // 2)
    got = turned(x_of(dtype), table)
    want = by_complex_numbers(x_of(dtype).double(), torch.arange(S).expand(B, S), 10000.0)
    assert got.dtype == dtype
    half_an_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), want, rtol=1.01 * half_an_ulp, atol=1e-6)


def test_far_positions_keep_their_angle_in_float32():
    # float32 angles near 100,000 radians are 8e-3 apart
    far = torch.tensor([100_000])
    wide, narrow = (rotary_table(far, 64, 10000.0, dtype) for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(narrow.cos.double(), wide.cos, rtol=0, atol=1.2e-2)
