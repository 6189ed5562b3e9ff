"""A layer pattern is a short description of which layers have a property."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megalith.config.layer_pattern import LayerPattern, holds, shortest_pattern


def test_a_pattern_repeats_over_the_layers_from_layer_0() -> None:
    assert [holds((True, True, False), index) for index in range(7)] == [True, True, False, True, True, False, True]


def test_a_pattern_of_one_value_is_that_of_every_layer() -> None:
    assert not any(holds((False,), index) for index in range(4))


def test_a_pattern_is_read_from_a_list_of_yaml() -> None:
    assert TypeAdapter(LayerPattern).validate_python([True, False]) == (True, False)


def test_the_shortest_pattern_repeats_to_the_layers_that_it_was_made_of() -> None:
    assert shortest_pattern((True, True)) is None
    assert shortest_pattern((True, False, True, False, True)) == (True, False)
    assert shortest_pattern((False, True, True, True)) == (False, True, True, True)


@pytest.mark.parametrize("pattern", [[], "true", [1.5], [None]])
def test_what_is_no_pattern_is_refused(pattern: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(LayerPattern).validate_python(pattern)
