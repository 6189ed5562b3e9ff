"""tolerance: the metric for comparing layouts, by hand."""

import math

import pytest
import torch

from megalith.numerics.tolerance import LAYOUT_FLOAT64, gradient_error


def test_the_error_is_relative_to_the_tensor():
    # |(0, 1)| / |(3, 4)| = 1/5
    assert gradient_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]), 0.0) == pytest.approx(0.2)


def test_a_gradient_that_is_zero_is_measured_by_all_the_others():
    noise, zero = torch.tensor([1e-16], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert gradient_error(noise, zero, 100.0) == pytest.approx(1e-12)
    assert gradient_error(noise, zero, 100.0) < LAYOUT_FLOAT64


def test_a_gradient_too_large_by_half_fails():
    g = torch.randn(5, 7, dtype=torch.float64)
    assert gradient_error(1.5 * g, g, g.norm().item()) == pytest.approx(0.5, rel=1e-5)


def test_nan_is_below_no_bound():
    assert math.isnan(gradient_error(torch.tensor([math.nan]), torch.ones(1), 1.0))
    assert not gradient_error(torch.tensor([math.nan]), torch.ones(1), 1.0) < LAYOUT_FLOAT64
