"""``megalith recipes``: what it lists, shows and copies, and shell completion."""

import pytest

from megalith.cli.recipes import complete_recipe
from megalith.config import load_run
from megalith.recipe_files import recipe_names, recipe_purpose, recipe_text
from tests.program import here
from tests.tiny_run import write_dataset


def test_list_names_every_recipe_and_says_what_it_is_for():
    found = here("recipes", "list")
    assert found.code == 0
    lines = found.out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipe_names())
    for name, line in zip(recipe_names(), lines, strict=True):
        assert recipe_purpose(name) in line
        assert recipe_purpose(name).endswith(".")
        assert "model" not in recipe_purpose(name).split(":")


def test_show_prints_the_file_as_it_is():
    for name in recipe_names():
        assert here("recipes", "show", name).out == recipe_text(name)


@pytest.mark.parametrize("to", ["", "mine.yaml", pytest.param("here", marks=pytest.mark.slow)])
def test_a_copy_is_the_same_run_and_can_be_planned_at_once(to, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    found = here("recipes", "copy", "llama-4m", *([to] if to else []))
    assert found.code == 0, found
    path = found.out.partition(":")[0]
    assert path == {"": "llama-4m.yaml", "here": "here/llama-4m.yaml"}.get(to, to)
    assert load_run(path) == load_run("llama-4m")
    prefix = write_dataset(tmp_path / "text", num_documents=200)
    planned = here("train", path, f"data.train={prefix}", "--dry-run")
    assert planned.code == 0, planned
    assert "parameters" in planned.out


def test_a_copy_overwrites_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    found = here("recipes", "copy", "llama-4m", tmp_path / "mine.yaml")
    assert (found.code, (tmp_path / "mine.yaml").read_text()) == (2, "mine")


def test_a_shell_is_given_the_recipes_that_begin_so():
    assert [name for name, _ in complete_recipe("llama")] == ["llama-28m", "llama-4m"]
    assert complete_recipe("x") == []
