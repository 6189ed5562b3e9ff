"""``megalith train --from MODEL``: the same command goes on, and another model for an existing run is refused."""

from pathlib import Path

import pytest
import yaml

from tests.cli.conversion_mistakes import model_folder
from tests.cli.mistakes import finished_run, snapshot, train
from tests.program import here

FEW = ("train.global_batch_size=2", "data.seq_length=16", "train.steps=1", "train.compile=false")


def from_model(folder: Path, model: Path, *more: object):
    """Trains one step in ``folder/tuned`` from ``model``; ``more`` overrides that."""
    return here("train", "--from", model, f"data.train={folder / 'text'}", f"run={folder / 'tuned'}", *FEW, *more)


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-00000001", "hf"])
def test_the_same_command_goes_on(source, tmp_path):
    finished_run(tmp_path)
    model_folder(tmp_path)
    assert from_model(tmp_path, tmp_path / source).code == 0
    found = from_model(tmp_path, tmp_path / source, "train.steps=2")
    assert found.code == 0, found
    assert "resumed from" in found.out


def test_a_run_goes_on_after_the_run_it_was_started_from_has_gone_on_too(tmp_path):
    finished_run(tmp_path)
    assert from_model(tmp_path, tmp_path / "run").code == 0
    load = yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())["load"]
    assert load == f"{tmp_path}/run/checkpoints/step-00000001"
    assert here(*train(tmp_path, "train.steps=3")).code == 0
    found = from_model(tmp_path, tmp_path / "run", "train.steps=2")
    assert found.code == 0, found
    assert "resumed from" in found.out
    assert yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())["load"] == load


def test_a_run_that_went_on_without_its_model_goes_on_with_it(tmp_path):
    finished_run(tmp_path)
    assert from_model(tmp_path, tmp_path / "run").code == 0
    assert here("train", tmp_path / "tuned", "load=null", "train.steps=2").code == 0
    assert from_model(tmp_path, tmp_path / "run", "train.steps=3").code == 0


@pytest.mark.parametrize("ranks", [(), ("--nproc", 2)])
def test_another_model_for_an_existing_run_is_refused(ranks, tmp_path):
    finished_run(tmp_path)
    other = model_folder(tmp_path)
    assert from_model(tmp_path, tmp_path / "run").code == 0
    before = snapshot(tmp_path)
    found = from_model(tmp_path, other, "train.steps=2", *ranks)
    assert (found.code, found.err) == (
        2,
        f"error: {tmp_path}/tuned already has a run that was started from {tmp_path}/run/checkpoints/step-00000001, "
        f"and not from {other}; give the new run another folder with run=..., or leave --from out to continue the "
        "existing one\n",
    )
    assert snapshot(tmp_path) == before


def test_a_model_for_a_run_that_started_from_none_is_refused(tmp_path):
    finished_run(tmp_path)
    found = from_model(tmp_path, model_folder(tmp_path), f"run={tmp_path / 'run'}", "--dry-run")
    assert found.code == 2
    assert "already has a run that was started without --from, and not from" in found.err


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-00000001"])
def test_a_run_that_would_start_from_itself_is_refused(source, tmp_path):
    finished_run(tmp_path)
    found = from_model(tmp_path, tmp_path / source, f"run={tmp_path / 'run'}", "train.steps=2")
    assert found.code == 2
    assert f"--from {tmp_path / source} is the run in {tmp_path / 'run'} itself; leave --from out" in found.err


def test_the_folder_of_a_run_in_place_of_a_recipe_is_refused(tmp_path):
    finished_run(tmp_path)
    found = here("train", tmp_path / "run", "train.steps=20", "--from", model_folder(tmp_path))
    assert (found.code, found.err) == (
        2,
        f"error: {tmp_path}/run is a folder, and --from takes a recipe or a YAML file beside it; leave --from out to "
        "continue the run in that folder, or give a new run its folder with run=...\n",
    )
