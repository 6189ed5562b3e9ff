"""docs/settings.md matches the code, and the code describes every field."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megalith.config.optim_config import ParamGroupOverride
from megalith.config.rules import RUN_RULES
from megalith.config.settings_page import settings_page
from megalith.config.settings_tree import FIELDS, GROUPS

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text("utf-8") == settings_page(), "run: python -m megalith.config.settings_page > docs/settings.md"


@pytest.mark.parametrize("name", [*FIELDS, *(f"override.{name}" for name in ParamGroupOverride.model_fields)])
def test_every_field_is_described_and_every_number_has_a_unit(name):
    field = FIELDS.get(name) or ParamGroupOverride.model_fields[name.partition(".")[2]]
    assert field.description
    kinds = {TypeAdapter(field.annotation).json_schema().get("type")} | {
        part.get("type") for part in TypeAdapter(field.annotation).json_schema().get("anyOf", [])
    }
    if kinds & {"integer", "number"} and name != "train.seed":
        assert field.description.startswith("["), field.description
    assert f"| `{name.rpartition('.')[2]}` |" in settings_page()


def test_every_required_field_has_an_example():
    required = [name for name, field in FIELDS.items() if field.is_required()]
    assert len(required) == 23
    assert all(FIELDS[name].examples for name in required)


def test_every_rule_is_on_the_page():
    page = settings_page()
    for rule in RUN_RULES:
        assert rule.__doc__.partition("\n")[0] in page


def test_a_run_has_few_groups_of_few_fields_with_one_name_each():
    top = [name for name in GROUPS if "." not in name]
    assert top == ["model", "data", "train", "optim", "parallel", "precision", "checkpoint"]
    # a nested group is counted separately
    sizes = {name: len(group.model_fields.keys() - group.nested_groups.keys()) for name, group in GROUPS.items()}
    assert sizes.pop("model") <= 19  # names of model shapes are common in the field
    assert max(sizes.values()) <= 17
    leaves = [name.rpartition(".")[2] for name in FIELDS]
    # these are clear next to their group's name
    assert {leaf for leaf in leaves if leaves.count(leaf) > 1} == {
        "decay_steps",
        "every",
        "factor",
        "ffn_hidden_size",
        "layers",
        "logit_softcap",
        "schedule",
        "window",
    }


def test_a_group_is_declared_under_the_name_that_it_has_in_the_tree():
    for name, group in GROUPS.items():
        assert group.dotted_name == name


def test_every_nested_group_has_a_heading_and_a_row_that_leads_to_it():
    page = settings_page()
    for name in GROUPS:
        depth = name.count(".")
        assert f"\n##{'#' * depth} {name}\n" in page
        assert not depth or f"| `{name.rpartition('.')[2]}` | group {name} |" in page
    assert "only with optim.schedule=WSD" in page
