"""Access to nested values by dotted name, at any depth."""

import pytest

from megalith.config.dotted import leaves, look_up, parent, put_, take_out_

TREE = {"a": {"b": {"c": {"d": 1}, "e": None}}, "f": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [("f", 2), ("a.b.c.d", 1), ("a.b.c", {"d": 1}), ("a.b.e", None), ("a.x.c", None), ("f.b", None), ("x", None)],
)
def test_a_value_is_found_by_its_name_and_none_is_none(name, value):
    assert look_up(TREE, name) == value


def test_leaves_are_everything_but_groups():
    assert list(leaves(TREE)) == [("a.b.c.d", 1), ("a.b.e", None), ("f", 2)]
    assert (parent("a.b.c"), parent("f")) == ("a.b", "")


def test_a_value_is_put_where_its_groups_are_made_for_it():
    tree = {"f": 2}
    put_(tree, "a.b.c.d", 1)
    put_(tree, "f.g", 3)
    assert tree == {"a": {"b": {"c": {"d": 1}}}, "f": {"g": 3}}


def test_groups_that_are_left_empty_go_too_but_not_at_the_top():
    tree = {"a": {"b": {"c": {"d": 1}}}, "x.y": 1, "z": {"v.w": 1}}
    for name in ("a.b.c.d", "a.b.c.d", "x.y", "z.v.w", "none.of.these"):
        take_out_(tree, name)
    assert tree == {"a": {}, "z": {}}
