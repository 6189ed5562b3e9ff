"""Reading and writing YAML with the core schema of YAML 1.2.2."""

import math

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalith.config.yaml_text import read_override, read_yaml, write_override, write_yaml
from megalith.errors import ConfigError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


# the rows of section 10.3.2 of the specification, and values that YAML 1.1 reads differently
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-19", -19),
        ("+12", 12),
        ("0.", 0.0),
        ("-0.0", 0.0),
        (".5", 0.5),
        ("+12e03", 12000.0),
        ("-2E+05", -200000.0),
        ("3e-4", 3e-4),
        ("6.02e23", 6.02e23),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("1_000_000", 1_000_000),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("0:16", "0:16"),
        ("2024-01-01", "2024-01-01"),
        ("1__0", "1__0"),
        ("0x1F", "0x1F"),
        ("nullify", "nullify"),
        ("'3'", "3"),
    ],
)
def test_plain_values_are_read_as_people_mean_them(text, value):
    read = read_yaml(text, "test")
    assert read == value
    assert type(read) is type(value)
    assert read_override(f"a.b={text}") == ("a.b", value)


@settings(max_examples=60)
@given(VALUES)
def test_what_is_written_is_read_back(value):
    assert read_yaml(write_yaml(value), "test") == value
    assert read_override(write_override("a.b", value)) == ("a.b", value)


@settings(max_examples=60)
@given(VALUES)
@example({"\x85": "a\u2028 b", "\r": "\ufeff"})
def test_other_readers_read_what_is_written_too(value):
    assert yaml.safe_load(write_yaml(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"file.yaml cannot be read as YAML: 'a' is given twice .*line 1"),
        ("x: {a: 1, a: 2}", r"'a' is given twice"),
        ("a: [1", r"line 1"),
        ("a: 1\n---\nb: 2", r"single document"),
        ("!!python/object:os.system x", r"could not determine a constructor"),
        ("\x00", r"unacceptable character"),
        (b"a: \xff", r"byte 3 is not UTF-8; save it as UTF-8"),
        ("!!int many", r"tagged int but is not a valid int .*line 1"),
        ("a: 1\nb: !!bool 7", r"tagged bool but is not a valid bool .*line 2"),
        ("!!float [1]", r"tagged float but is not a valid float"),
        ("!!timestamp 2024-13-99", r"could not determine a constructor"),
        ("a: " + "9" * 5000, r"integer of 5,000 digits; settings may have at most 100"),
        ("[" * 500 + "]" * 500, r"more than 20 levels"),
        ("{a: " * 50_000, r"more than 20 levels"),
        ("a: [" + "1, " * 5000 + "]", r"more than 4,000 values"),
        ("- 1\n" * 70_000, r"it has 280,000 bytes; settings may have at most 262,144"),
        ("&a [*a]", r"an alias refers to a node that contains it"),
        ("&a {b: {c: *a}}", r"an alias refers to a node that contains it"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        read_yaml(text, "file.yaml")


def billion_laughs(num_lines: int) -> str:
    """Each line expands to ten of the previous one: 12 lines for 10**12 values."""
    lines = ["l0: &l0 [lol]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, num_lines)]
    return "\n".join(lines)


def test_aliases_are_read_and_those_that_explode_are_refused_before_they_do():
    assert read_yaml("a: &x [1, 2]\nb: *x", "test") == {"a": [1, 2], "b": [1, 2]}
    assert len(read_yaml(billion_laughs(3), "test")["l2"]) == 10
    with pytest.raises(ConfigError, match=r"more than 4,000 values after expanding aliases .*line 5"):
        read_yaml(billion_laughs(12), "test")
