"""in_order: texts that are drawn side by side, one after the other on a terminal."""

from megalith.training.tasks.generation import in_order


def test_the_first_text_grows_as_it_is_drawn_and_others_wait_for_it():
    pieces = [["a", "x"], ["b", ""], ["c", None], [None, None]]
    shown = in_order(["1:", "2:"], iter(pieces))
    assert next(shown) == "1:"
    assert [next(shown) for _ in range(3)] == ["a", "b", "c"]
    assert list(shown) == ["\n2:", "x", "\n"]


def test_a_text_that_has_grown_behind_another_goes_on_as_it_is_drawn():
    pieces = [["a", "x", "q"], [None, "y", None], [None, "z", None], [None, "!", None]]
    shown = in_order(["1:", "2:", "3:"], iter(pieces))
    assert list(shown) == ["1:", "a", "\n2:", "xy", "z", "!", "\n3:q", "\n"]


def test_texts_of_nothing_are_their_openings():
    assert "".join(in_order(["1:", "2:"], iter([["", ""]]))) == "1:\n2:\n"
