"""stop_strings: text is passed on up to the first stop string, whatever pieces it arrives in."""

import itertools

import pytest

from megalith.data.stop_strings import StopStrings
from megalith.errors import ConfigError


def passed_on(text: str, stops: list[str], cuts: tuple[int, ...]) -> tuple[str, bool]:
    until, borders = StopStrings(stops), [0, *cuts, len(text)]
    given = "".join(until.add(text[a:b]) for a, b in itertools.pairwise(borders))
    return given + until.end(), until.found


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("aab", ["ab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("abcabd", ["abd", "bca"], "a"),
        ("stop", ["stop"], ""),
        ("über", ["r"], "übe"),
    ],
)
def test_a_text_ends_where_the_first_stop_string_begins(text, stops, want):
    for number in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), number):
            assert passed_on(text, stops, cuts) == (want, True), cuts


@pytest.mark.parametrize("stops", [[], ["x"], ["abx", "cd "]])
def test_a_text_without_one_is_passed_on_whole(stops):
    for cut in range(1, 4):
        assert passed_on("abcd", stops, (cut,)) == ("abcd", False)


def test_only_what_may_begin_one_is_held_back():
    until = StopStrings(["END"])
    assert [until.add(piece) for piece in ("an E", "gg, E", "N", "D, more")] == ["an ", "Egg, ", "", ""]
    assert until.found
    assert until.add("more") == ""
    assert until.end() == ""


def test_an_empty_one_is_refused():
    with pytest.raises(ConfigError, match="a stop string must not be empty; got an empty one"):
        StopStrings(["a", ""])
