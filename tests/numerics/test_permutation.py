"""permutation: a bijection at every size, uniform over seeds, and stable numbers."""

from collections import Counter
from math import factorial, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.numerics import permutation
from megalith.numerics.permutation import KeyedPermutation

SEEDS = st.integers(-(2**70), 2**70)


@given(n=st.integers(1, 3000), seed=SEEDS, name=st.text(max_size=8))
def test_it_is_a_bijection_of_every_size(n, seed, name):
    image = KeyedPermutation(n, seed, name)(np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))


@given(n=st.integers(1, 2**62), seed=SEEDS, part=st.floats(0, 1, exclude_max=True))
def test_one_index_has_the_image_that_it_has_among_many(n, seed, part):
    permute = KeyedPermutation(n, seed, "windows-0")
    index = int(n * part) % n
    image = permute(index)
    assert isinstance(image, int)
    assert 0 <= image < n
    assert permute(np.array([[0, index], [n - 1, index]]))[:, 1].tolist() == [image, image]


@pytest.mark.parametrize(("n", "trials"), [(4, 600), pytest.param(5, 3000, marks=pytest.mark.slow)])
def test_every_order_is_equally_likely_over_seeds(n, trials):
    orders = Counter(tuple(KeyedPermutation(n, seed, "x")(np.arange(n)).tolist()) for seed in range(trials))
    expected = trials / factorial(n)
    assert len(orders) == factorial(n)
    degrees = factorial(n) - 1
    chi_square = sum((count - expected) ** 2 / expected for count in orders.values())
    assert abs(chi_square - degrees) < 3 * sqrt(2 * degrees)  # its mean and standard deviation


def test_neighbours_part_and_fixed_points_are_as_rare_as_chance_has_it():
    n = 100_000
    image = KeyedPermutation(n, 1234, "documents-0")(np.arange(n))
    assert np.count_nonzero(image == np.arange(n)) < 8  # Poisson with mean 1
    assert np.count_nonzero(np.diff(image) == 1) < 8
    # n random pairs correlate by about 1 / sqrt(n)
    assert abs(np.corrcoef(image, np.arange(n))[0, 1]) < 5 / sqrt(n)


def test_another_seed_or_name_gives_an_unrelated_order():
    n = 10_000
    orders = [KeyedPermutation(n, seed, name)(np.arange(n)) for seed, name in [(1, "a"), (1, "b"), (2, "a")]]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert np.count_nonzero(orders[one] == orders[other]) < 8


def test_the_order_of_data_never_changes_between_versions():
    assert KeyedPermutation(10, 1234, "documents-0")(np.arange(10)).tolist() == [5, 0, 6, 1, 3, 2, 8, 4, 9, 7]
    first = KeyedPermutation(10**12, 1234, "windows-0")(np.arange(3))
    assert first.tolist() == [969917960309, 820087787384, 844319831350]


def test_the_hash_is_that_of_splitmix64():
    # the generator's first two published outputs for seed 0: the finaliser of one and of two golden-ratio steps
    golden = 0x9E3779B97F4A7C15
    steps = np.array([golden, 2 * golden % 2**64], dtype=np.uint64)
    assert [hex(word) for word in permutation._hash(steps, np.uint64(0))] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


def test_indices_outside_are_refused():
    permute = KeyedPermutation(5, 0, "x")
    for index in (5, -1, np.array([0, 5])):
        with pytest.raises(IndexError, match=r"must be in \[0, 5\)"):
            permute(index)
    assert permute(np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_sizes_out_of_range_are_refused(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        KeyedPermutation(n, 0, "x")
