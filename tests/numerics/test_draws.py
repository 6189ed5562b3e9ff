"""draws: a function of (seed, name, index), pinned to the bit, and uniform."""

import numpy as np

from megalith.numerics.draws import Draws, uniform_rows


def test_the_numbers_of_a_seed_name_and_index_are_fixed():
    first = Draws(7, "masks", 3).uniform(2)
    assert np.array_equal(Draws(7, "masks", 3).uniform(2), first)
    others = [Draws(8, "masks", 3), Draws(7, "order", 3), Draws(7, "masks", 4)]
    assert all(not np.isclose(other.uniform(2), first).any() for other in others)


def test_rows_of_a_table_do_not_depend_on_where_reading_begins():
    table = uniform_rows(1, "x", 0, 50)
    for first, number in ((0, 1), (7, 20), (49, 1)):
        assert np.array_equal(uniform_rows(1, "x", first, number), table[first : first + number])


def test_draws_are_uniform():
    n, bins = 40_000, 20
    counts = np.bincount((Draws(0, "x", 0).uniform(n) * bins).astype(int), minlength=bins)
    chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum()
    assert chi_square < 19 + 5 * np.sqrt(2 * 19)  # mean and five standard deviations for 19 degrees of freedom
    orders = np.array([Draws(0, "y", index).order(4) for index in range(4000)])
    places = np.array([np.bincount(orders[:, place], minlength=4) for place in range(4)])
    assert np.abs(places - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
