"""Human-readable numbers, at the values where the unit changes."""

import math

import pytest

from megalith.observe.units import duration, energy, gibibytes, perplexity, quantity


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00123, "0.00123"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (999_499, "999k"),
        (999_600, "1.00M"),
        (4_012_288, "4.01M"),
        (-1500, "-1.50k"),
        (8e9, "8.00G"),
        (1.5e12, "1.50T"),
        (2e15, "2.00P"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_quantities_have_three_digits_and_the_suffix_of_their_size(value, text):
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("joules", "text"), [(0, "0 J"), (523.4, "523 J"), (999.6, "1.00 kJ"), (12_345, "12.3 kJ"), (1.234e6, "1.23 MJ")]
)
def test_energies_have_the_prefix_of_their_size(joules, text):
    assert energy(joules) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0412, "41.2 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (250, "4 min 10 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (86400 * 25 + 3600 * 22, "25 d 22 h"),
        (math.inf, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_durations_are_in_their_largest_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.00 GiB"), (2**28, "0.25 GiB"), (9.99 * 2**30, "9.99 GiB"), (9.996 * 2**30, "10.0 GiB"),
     (99.96 * 2**30, "100 GiB"), (2000 * 2**30, "2,000 GiB")],
)  # fmt: skip
def test_memory_is_in_gibibytes_to_three_digits(num_bytes, text):
    assert gibibytes(num_bytes) == text


def test_perplexity_is_the_exponential_and_knows_no_number_too_large():
    assert perplexity(2.0) == pytest.approx(2.718281828459045**2)
    assert math.isfinite(perplexity(699.0))
    assert perplexity(700.0) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
