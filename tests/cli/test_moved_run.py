"""A run's folder that was moved, without its data, used from another working directory."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from megalith.config import dump_yaml, load_run
from megalith.data.tokenizer import Tokenizer
from megalith.observe.metrics import read_metrics
from megalith.storage import open_store
from megalith.training.preflight import resolve_run_folder
from megalith.training.run_folder import find_tokenizer
from tests.cli.trained_run import generate, write_texts
from tests.program import here, write_settings
from tests.tiny_run import settings


@pytest.fixture
def moved(original, tmp_path, monkeypatch):
    """The run's folder in a new place and its data in another; the working folder is a third one, and empty."""
    shutil.copytree(original.kept / "run", tmp_path / "there")
    shutil.copytree(original.kept / "data", tmp_path / "place")
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path / "there"


def test_a_run_keeps_its_tokenizer_and_absolute_paths(original):
    kept = Tokenizer.load(original.kept / "run" / "tokenizer.json")
    assert kept.sha256 == Tokenizer.load(original.kept / "data" / "text-tokenizer.json").sha256
    assert json.loads((original.kept / "run" / "eod.json").read_text()) == {
        "id": kept.eod,
        "begin": [],
        "ends": [kept.eod],
    }
    settings = yaml.safe_load((original.kept / "run" / "config.yaml").read_text())
    assert settings["data"]["train"] == str(original.place / "data" / "text")
    assert settings["data"]["valid"] == str(original.place / "data" / "text-valid")
    assert settings["run"] == str(original.place / "run")


def test_it_generates_the_same_text_without_the_data(original, moved):
    assert generate(moved) == original.text
    assert original.text.code == 0
    assert original.text.out.startswith("Once")
    [step] = (moved / "checkpoints").glob("step-*")
    assert generate(step) == original.text
    assert generate("../there") == original.text


def test_a_checkpoint_is_found_from_inside_the_run_and_by_a_link(original, moved, monkeypatch):
    [step] = (moved / "checkpoints").glob("step-*")
    (moved.parent / "link").symlink_to(step)
    (moved.parent / "links").mkdir()
    (moved.parent / "links" / "all").symlink_to(moved / "checkpoints")
    for folder, source in (
        (moved / "checkpoints", step.name),
        (step, "."),
        (step, "./"),
        (moved, "."),
        (moved.parent / "working", "../link"),
        (moved.parent / "working", f"../links/all/{step.name}"),
    ):
        monkeypatch.chdir(folder)
        assert generate(source) == original.text, source
        found = here("eval", source, "--data", moved.parent / "place" / "text-valid")
        assert found.out.partition(": loss")[2] == original.loss.out.partition(": loss")[2]


def test_the_checkpoints_of_a_run_may_be_on_another_disk(original, moved):
    (moved / "checkpoints").rename(moved.parent / "disk")
    (moved / "checkpoints").symlink_to(moved.parent / "disk")
    [step] = (moved / "checkpoints").glob("step-*")
    assert generate(step) == original.text
    assert generate(moved) == original.text


def test_a_checkpoint_that_is_not_complete_is_told_once(original, moved, caplog):
    (moved / "checkpoints" / "step-00000009").mkdir()
    assert generate(moved).out == original.text.out
    assert caplog.text.count("step-00000009: it is not a complete checkpoint") == 1


def test_it_evaluates_on_data_in_their_new_place(original, moved):
    assert original.loss.code == 0
    found = here("eval", moved, "--data", "../place/text-valid")
    assert found.code == 0, found
    assert found.out.partition(": loss")[2] == original.loss.out.partition(": loss")[2]


def test_without_data_eval_names_the_option(moved):
    found = here("eval", moved)
    assert found.code == 2
    assert "data.valid of" in found.err
    assert found.err.endswith("give other data with --data PREFIX\n")


@pytest.mark.parametrize("source", ["../there", "../there/config.yaml"])
def test_it_goes_on_where_it_lies_now_on_data_in_their_new_place(source, moved):
    place = moved.parent / "place"
    more = [f"data.train={place / 'text'}", f"data.valid={place / 'text-valid'}", "train.steps=3"]
    found = here("train", source, *more)
    assert found.code == 0, found
    assert "resumed from" in found.out
    assert [record["step"] for record in read_metrics(moved) if "loss" in record] == [1, 2, 3]
    assert yaml.safe_load((moved / "config.yaml").read_text())["run"] == str(moved)
    assert not list(Path().iterdir())  # nothing is created in the working folder


def test_it_goes_on_when_the_tokenizer_and_the_weights_it_started_from_are_gone(moved):
    place = moved.parent / "place"
    (place / "text-tokenizer.json").unlink()
    kept = (moved / "tokenizer.json").read_bytes()
    found = here("train", moved, f"data.train={place / 'text'}", "data.valid=null", "train.steps=3", "load=gone")
    assert found.code == 0, found
    assert (moved / "tokenizer.json").read_bytes() == kept
    assert generate(moved).code == 0


def test_a_run_that_keeps_no_tokenizer_takes_one_that_is_given(original, moved):
    tokenizer = moved.parent / "place" / "text-tokenizer.json"
    assert generate(moved, "--tokenizer", tokenizer) == original.text
    (moved / "tokenizer.json").unlink()
    assert generate(moved, "--tokenizer", tokenizer) == original.text
    found = generate(moved)
    assert found.code == 2
    assert "has no tokenizer.json, and" in found.err
    assert found.err.endswith("or give --tokenizer PATH\n")


def test_another_tokenizer_than_the_kept_one_is_refused(moved):
    write_texts(Path("texts"))
    assert here("data", "prepare", "texts", "--out", "other", "--vocab-size", 270).code == 0
    found = generate(moved, "--tokenizer", "other-tokenizer.json")
    assert found.code == 2
    assert "is not the tokenizer that" in found.err
    found = here("eval", moved, "--data", "other")
    assert found.code == 2
    assert "other was made with a different tokenizer than the training data of" in found.err


def test_an_unusual_end_of_documents_is_kept_with_the_tokenizer(moved):
    (moved / "eod.json").write_text('{"id": 5}')
    tokenizer = find_tokenizer(open_store(moved), None)
    assert tokenizer.eod == 5
    assert find_tokenizer(open_store(moved), None, moved / "tokenizer.json").eod == 5
    assert find_tokenizer(open_store(moved), None, moved / "tokenizer.json", "!").eod == tokenizer.encode("!")[0]


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]", b'{"id": true}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "eod.json", "config.yaml"])
def test_a_damaged_file_is_named(name, content, moved):
    (moved / name).write_bytes(content)
    for command in (generate(moved), here("eval", moved, "--data", "../place/text-valid")):
        assert command.code == 2, command
        assert command.err.startswith(f"error: {moved / name} ")
        assert "Traceback" not in command.err


def test_the_way_out_of_a_tokenizer_that_is_gone_is_the_kept_one(moved):
    more = [f"data.train={moved.parent / 'place' / 'text'}", "data.valid=null", "train.steps=3"]
    gone = here("train", moved, *more, "data.tokenizer=gone.json")
    assert gone.code == 2
    assert gone.err.count("gone.json must be a tokenizer.json") == 1
    way_out = f"data.tokenizer={moved / 'tokenizer.json'}"
    assert gone.err.endswith(f"; or use the copy in the run's folder: {way_out}\n")
    assert here("train", moved, *more, way_out).code == 0


def test_a_stale_tokenizer_is_not_kept_by_a_run_that_has_none(tmp_path):
    tree = settings(tmp_path, train={"steps": 1})
    (tmp_path / "run").mkdir()
    for name in ("tokenizer.json", "eod.json"):
        (tmp_path / "run" / name).write_text("of a run that was never saved")
    assert here("train", write_settings(tree, tmp_path)).code == 0
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    assert not (tmp_path / "run" / "eod.json").exists()


def test_data_by_their_url_name_their_tokenizer_too(original, moved):
    place = moved.parent / "place"
    more = [f"data.train=file://{place / 'text'}", f"data.valid=file://{place / 'text-valid'}"]
    found = here("train", original.kept / "settings.yaml", *more, "run=by-url")
    assert found.code == 0, found
    assert Path("by-url/tokenizer.json").read_bytes() == (place / "text-tokenizer.json").read_bytes()
    inspected = here("data", "inspect", f"file://{place / 'text'}")
    assert "cannot be read" not in inspected.out + inspected.err


def test_a_setting_of_the_run_still_names_another_folder(moved):
    source, overrides = resolve_run_folder(str(moved), ["run=other"])
    assert load_run(source, overrides).run == "other"
    assert load_run(source, overrides[:1]).run == str(moved)
    assert resolve_run_folder("llama-4m", []) == ("llama-4m", [])


@pytest.mark.parametrize(
    ("saved", "overrides", "decays_for"),
    [
        ({"steps": 4, "decay_steps": None}, ["train.steps=9"], 9),
        ({"steps": 4, "decay_steps": None}, ["optim.lr=0.01"], 4),
        ({"steps": 4, "decay_steps": 3}, ["train.steps=9"], 3),  # one of the run's own
        ({"steps": 4, "decay_steps": None}, ["train.steps=9", "optim.decay_steps=6"], 6),
        ({"steps": 4, "decay_steps": None}, ["train.steps=2"], 2),
    ],
)
def test_a_rate_that_decays_to_the_end_does_so_when_the_run_goes_on_by_its_folder(
    saved, overrides, decays_for, tmp_path
):
    tree = settings(tmp_path, train={"steps": saved["steps"]})
    tree["optim"] |= {"schedule": "cosine", "warmup_steps": 1, "decay_steps": saved["decay_steps"]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(load_run(tree)))
    (tmp_path / "run" / "about.json").write_text("{}")
    for source in (tmp_path / "run", tmp_path / "run" / "config.yaml"):
        config = load_run(*resolve_run_folder(str(source), overrides))
        assert config.optim.decay_steps == decays_for


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    found = here("train", tmp_path)
    assert found.code == 2
    assert "is a folder without a config.yaml" in found.err
