"""The sample for `make test`: few parameters cover everything once, and always the same ones."""

from itertools import product

from tests.sampling import cover


def test_everything_is_shown_by_few():
    pairs = list(product("abc", range(3)))
    assert cover(pairs, set) == [("a", 0), ("b", 1), ("c", 2)]  # of nine
    assert cover(pairs, lambda pair: {pair}) == pairs


def test_what_is_new_is_taken_without_thought():
    assert cover([*product("ab", range(2)), ("z", 0)], set) == [("a", 0), ("b", 1), ("z", 0)]


def test_of_nothing_nothing_is_taken():
    assert cover([], set) == []
