"""about.json: where a run comes from, kept over its starts."""

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
