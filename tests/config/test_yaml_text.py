"""YAML as the core schema of YAML 1.2.2 reads it, and back."""

import math

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalith.config.yaml_text import read_override, read_yaml, write_override, write_yaml
from megalith.errors import ConfigError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


# the rows of section 10.3.2 of the specification, and where YAML 1.1 reads otherwise
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
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        read_yaml(text, "file.yaml")
