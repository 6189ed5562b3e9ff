"""A group of settings: frozen, strict, null means not set, and each field notes when it is read."""

import timeit

import pytest
from pydantic import Field, ValidationError

from megalith.config.settings_group import Follows, SettingsGroup, given_fields, reads_of


class Group(SettingsGroup):
    width: int = Field(ge=1)
    height: int = 2
    depth: int = Field(default_factory=Follows(lambda group: group["width"] * 10))


def test_a_default_follows_the_fields_before_it():
    assert (Group(width=3).depth, Group(width=3, depth=4).depth) == (30, 4)


def test_a_read_is_noted_by_name():
    group = Group(width=1)
    assert reads_of(group).seen == set()
    assert (group.width, group.depth) == (1, 10)
    assert reads_of(group).seen == {"width", "depth"}


def test_groups_are_equal_by_value_whoever_has_read_them():
    one, other = Group(width=1), Group(width=1)
    assert one.height == 2
    reads_of(one).explicit = frozenset({"width"})
    assert one == other
    assert hash(one) == hash(other)
    assert one != Group(width=2)


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
    with pytest.raises(AttributeError, match="model_copy"):
        Group.__dict__["width"].__set__(Group(width=1), 2)


def test_reading_a_field_costs_under_two_microseconds():
    group = Group(width=1)
    assert min(timeit.repeat(lambda: group.width, number=10_000, repeat=5)) / 10_000 < 2e-6
