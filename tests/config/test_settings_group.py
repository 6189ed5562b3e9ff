"""A settings group: frozen, strict, null means not set, optional parts are nested groups."""

from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from megalith.config.settings_group import Follows, SettingsGroup, given_fields, group_at, plain_fields


class Group(SettingsGroup):
    width: int = Field(ge=1)
    height: int = 2
    depth: int = Field(default_factory=Follows(lambda group: group["width"] * 10))


def test_a_default_follows_the_fields_before_it():
    assert (Group(width=3).depth, Group(width=3, depth=4).depth) == (30, 4)


def test_groups_are_equal_by_value():
    assert Group(width=1) == Group(width=1, height=2)
    assert hash(Group(width=1)) == hash(Group(width=1, height=2))
    assert Group(width=1) != Group(width=2)


def test_null_is_a_field_that_is_not_set():
    group = Group.model_validate({"width": 1, "height": None, "depth": None})
    assert (group.height, group.depth) == (2, 10)
    assert given_fields(group) == {"width": 1}
    with pytest.raises(ValidationError, match="Field required"):
        Group.model_validate({"width": None})


@pytest.mark.parametrize(
    "fields", [{"width": "8"}, {"width": True}, {"width": 1.0}, {"width": 0}, {"width": 1, "x": None}]
)
def test_other_types_and_other_names_are_refused(fields):
    with pytest.raises(ValidationError):
        Group.model_validate(fields)


def test_a_field_is_neither_set_nor_found_on_the_class():
    with pytest.raises(ValidationError, match="frozen"):
        Group(width=1).width = 2
    with pytest.raises(AttributeError):
        _ = Group.width


class Leaf(SettingsGroup):
    dotted_name: ClassVar[str] = "branch.leaf"

    size: int = Field(default=1, ge=1)


class Branch(SettingsGroup):
    dotted_name: ClassVar[str] = "branch"

    leaf: Leaf | None = Field(default=None)
    length: int = 5


class Tree(SettingsGroup):
    branch: Branch = Field(default_factory=Branch)


def test_groups_nest_at_any_depth_and_know_their_names():
    assert dict(Tree.nested_groups) == {"branch": Branch}
    assert dict(Branch.nested_groups) == {"leaf": Leaf}
    assert group_at(Tree, "branch.leaf") is Leaf
    names = Leaf.name_of("size"), Branch.name_of("leaf"), Tree.name_of("branch")
    assert names == ("branch.leaf.size", "branch.leaf", "branch")
    tree = Tree.model_validate({"branch": {"leaf": {"size": 3}}})
    assert (tree.branch.leaf, tree.branch.length) == (Leaf(size=3), 5)


def test_an_optional_group_of_which_nothing_is_set_is_not_there():
    for leaf in ({}, None, {"size": None}, Leaf()):
        assert Tree.model_validate({"branch": {"leaf": leaf}}).branch.leaf is None
    assert Branch(leaf=Leaf(size=2)).leaf == Leaf(size=2)
    assert plain_fields(Tree, {"branch": Branch(leaf=Leaf(size=2))}) == {"branch": {"leaf": {"size": 2}}}


def test_an_error_in_a_nested_group_says_where():
    with pytest.raises(ValidationError, match=r"branch\.leaf\.size"):
        Tree.model_validate({"branch": {"leaf": {"size": 0}}})
