"""Fields of untrusted JSON: each has the requested type, or the error names it and its value."""

import json
import math
import sys

import pytest

from megalith.errors import CheckpointError
from megalith.storage import MOST_COUNTED, WAY_OUT, JsonFields, float_sized, shown


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("2", '"2"'),
        (math.nan, "NaN"),
        ("\ud800", r'"\ud800"'),
        ({"a": [1, 2.5]}, '{"a": [1, 2.5]}'),
        ("x" * 200, '"' + "x" * 99 + "..."),
    ],
)
def test_a_value_is_shown_as_json_and_cut(value, text):
    assert shown(value) == text


def test_what_is_nested_too_deeply_is_shown_as_that():
    assert shown(nested(100_000)) == "something nested too deeply"


def test_fields_are_given_as_they_are():
    fields = JsonFields({"n": 3, "x": 2, "s": "a", "o": {"deep": 1}, "z": None})
    assert (fields.count("n"), fields.number("x"), fields.text("s")) == (3, 2.0, "a")
    assert type(fields.number("x")) is float
    assert (fields.object("o").count("deep"), fields.is_null("z"), fields.is_null("none")) == (1, True, False)


@pytest.mark.parametrize("value", [-1, MOST_COUNTED + 1, 2.0, True, "2", None, math.nan])
def test_what_is_no_count_is_refused_by_its_dotted_name(value):
    fields = JsonFields({"o": {"n": value}}).object("o")
    with pytest.raises(CheckpointError) as caught:
        fields.count("n")
    assert str(caught.value) == f"o.n must be an integer from 0 to 100000000000000; got {shown(value)}; {WAY_OUT}"


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, 10**400, True, "2", None, [1.0]])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(CheckpointError, match=r"^x must be a finite number of at least 0; got "):
        JsonFields({"x": value}).number("x")


def test_an_integer_is_read_exactly_up_to_the_largest_float_and_refused_beyond():
    largest = int(sys.float_info.max)
    assert json.loads(f"[{largest}, -3]", parse_int=float_sized) == [largest, -3]
    for digits in (str(largest + 1), "-" + "9" * 400):
        with pytest.raises(ValueError, match=r"integer of [34][0-9]{2} digits is too large"):
            json.loads(digits, parse_int=float_sized)
