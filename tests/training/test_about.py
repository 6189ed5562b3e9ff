"""about.json: the origin of a run, kept across restarts."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.program import Ended, here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import settings


def train(settings_file: Path, *overrides: str) -> Ended:
    return here("train", settings_file, *overrides)


def about(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run" / "about.json").read_text())


def test_it_names_recipe_model_start_and_a_command_that_a_shell_takes(tmp_path):
    file = write_settings(settings(tmp_path, train={"steps": 1}), tmp_path)
    [ended] = ranks(1, train, file, "optim.overrides=[{match: '*norm*', max_lr: 1e-3}]")
    assert ended.code == 0, ended
    found = about(tmp_path)
    assert found["recipe"] == "settings"
    assert found["command"] == (
        f"megalith train {file} 'optim.overrides=[{{match: '\"'\"'*norm*'\"'\"', max_lr: 1e-3}}]'"
    )
    assert "model" not in found  # a shape without a name
    datetime.strptime(str(found["started"]), "%Y-%m-%d %H:%M UTC")


@pytest.mark.parametrize("damage", [None, "[]"])
def test_a_run_that_goes_on_keeps_its_first_start_and_names_its_last_command(tmp_path, damage):
    file = write_settings(settings(tmp_path, train={"steps": 1}), tmp_path)
    ranks(1, train, file)
    path = tmp_path / "run" / "about.json"
    path.write_text(json.dumps(about(tmp_path) | {"started": "2020-02-02 02:02 UTC"}) if damage is None else damage)
    [ended] = ranks(1, train, file, "train.steps=2")
    assert ended.code == 0, ended
    assert (about(tmp_path)["started"] == "2020-02-02 02:02 UTC") == (damage is None)
    assert str(about(tmp_path)["command"]).endswith(" train.steps=2")


def test_several_ranks_are_in_the_command(tmp_path):
    file = write_settings(settings(tmp_path, train={"steps": 1}, parallel={"shard": 2}), tmp_path)
    assert [ended.code for ended in ranks(2, train, file)] == [0, 0]
    assert str(about(tmp_path)["command"]).endswith("settings.yaml --nproc 2")


def test_going_on_by_the_folder_keeps_the_recipe_and_names_the_folder_as_it_was_given(tmp_path, monkeypatch):
    file = write_settings(settings(tmp_path, train={"steps": 1}), tmp_path)
    monkeypatch.chdir(tmp_path)
    ranks(1, train, file)
    for source in ("run", "run/config.yaml"):
        [ended] = ranks(1, train_in, tmp_path, source, "train.steps=2", "train.log_every=7")
        assert ended.code == 0, ended
    found = about(tmp_path)
    assert found["recipe"] == "settings"
    assert found["command"] == "megalith train run train.steps=2 train.log_every=7"  # the second had nothing to do
    [ended] = ranks(1, train_in, tmp_path, "run", "run=other")
    assert ended.code == 0, ended
    other = json.loads((tmp_path / "other" / "about.json").read_text())
    assert (other["recipe"], other["command"]) == ("settings", "megalith train run run=other")


def test_a_recipe_that_cannot_be_read_any_more_is_not_replaced_by_another_name(tmp_path):
    file = write_settings(settings(tmp_path, train={"steps": 1}), tmp_path)
    ranks(1, train, file)
    (tmp_path / "run" / "about.json").write_text("[]")
    [ended] = ranks(1, train_in, tmp_path, "run", "train.steps=2")
    assert ended.code == 0, ended
    assert "recipe" not in about(tmp_path)


def train_in(folder: Path, source: str, *overrides: str) -> Ended:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return here("train", source, *overrides)
