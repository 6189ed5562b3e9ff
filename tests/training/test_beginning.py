"""Where a run starts: at the newest valid checkpoint, reporting what changed; it never overwrites its own results."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.errors import DataError
from megalith.observe.metrics import read_metrics
from megalith.storage import WAY_OUT, LocalStore
from megalith.training.saves import refuse_if_saved
from tests.checkpoint.manifests import replace_listed
from tests.program import Ended, here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import settings, write_dataset
from tests.training.starts import MODEL, go_on_with, snapshot

SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of four steps, in ``run``, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    tree = settings(folder, model=MODEL, checkpoint={"every": 2, "keep": 5}, precision={"dtype": "float32"})
    write_settings(tree, folder)
    assert here("train", folder / "settings.yaml").code == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """This test's own copy of the finished run's folder."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def train(finished: Path, run: Path, *overrides: object) -> Ended:
    """Repeats the command that began the run, with ``overrides``; by default it trains for two more steps."""
    return here("train", finished / "settings.yaml", f"run={run}", "train.steps=6", *overrides)


def train_on_two_ranks(finished: Path, run: Path, *overrides: str) -> str:
    """The same on two ranks; returns what rank 0 shows, or the one error that all ranks raise."""
    file, settings = finished / "settings.yaml", [f"run={run}", "train.steps=6", "parallel.tensor=2", *overrides]
    first, second = ranks(2, go_on_with, file, settings)
    assert second in (first, ""), "ranks raise one error, and rank 0 alone shows what it did"
    return first


def refusal(finished: Path, run: Path, *overrides: str, num_ranks: int = 1) -> str:
    """The message with which every rank refuses to start; nothing is changed."""
    before = snapshot(run)
    if num_ranks == 1:
        found = train(finished, run, *overrides)
        assert found.code == 2, found
        assert found.err.count("error: ") == 1
        assert "Traceback" not in found.err
        message = found.err
    else:
        message = train_on_two_ranks(finished, run, *overrides)
        assert message.startswith("error on every rank: ")
    assert snapshot(run) == before
    return message


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run)]


# ---- nothing left to do


@pytest.mark.parametrize("wanted", [4, 3])
def test_a_run_whose_steps_are_done_says_so_and_writes_nothing(finished, run, wanted):
    before = snapshot(run)
    found = train(finished, run, f"train.steps={wanted}")
    says = (
        f"nothing to do: {run}/checkpoints/step-00000004 is at step 4, and train.steps is {wanted}; "
        "set train.steps above 4 to continue"
    )
    assert (found.code, found.err, found.out.splitlines()) == (0, "", [says])
    assert train_on_two_ranks(finished, run, f"train.steps={wanted}") == says
    assert snapshot(run) == before


# ---- checkpoints that are damaged or gone


def edit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def delete_steps(run: Path) -> None:
    for step in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(step)


def delete_checkpoints_of_an_earlier_version(run: Path) -> None:
    delete_checkpoints(run)
    (run / "saved.json").unlink()


def damage_manifests(run: Path) -> None:
    for step in (run / "checkpoints").glob("step-*"):
        edit(step / "manifest.json")


def delete_manifests(run: Path) -> None:
    for step in (run / "checkpoints").glob("step-*"):
        (step / "manifest.json").unlink()


def damage_shards(run: Path) -> None:
    for step in (run / "checkpoints").glob("step-*"):
        edit(step / SHARD)


def set_all_aside(run: Path) -> None:
    for step in (run / "checkpoints").glob("step-*"):
        step.rename(f"{step}.damaged")


def delete_checkpoints_of_an_earlier_version_that_saved_at_its_end(run: Path) -> None:
    delete_checkpoints_of_an_earlier_version(run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("every: 2", "every: null"))


def damage_settings_of_an_earlier_version(run: Path) -> None:
    delete_checkpoints_of_an_earlier_version(run)
    (run / "config.yaml").write_text("{")


def list_settings_of_an_earlier_version(run: Path) -> None:
    delete_checkpoints_of_an_earlier_version(run)
    (run / "config.yaml").write_text("[1]")


def delete_settings_of_an_earlier_version(run: Path) -> None:
    delete_checkpoints_of_an_earlier_version(run)
    (run / "config.yaml").unlink()


LOSSES: dict[Callable[[Path], None], str] = {
    delete_checkpoints: "metrics.jsonl goes up to step 4",
    delete_checkpoints_of_an_earlier_version: "metrics.jsonl goes up to step 4",
    delete_checkpoints_of_an_earlier_version_that_saved_at_its_end: "metrics.jsonl goes up to step 4",
    damage_settings_of_an_earlier_version: "config.yaml, which would show whether the run has saved, cannot be read",
    list_settings_of_an_earlier_version: "config.yaml, which would show whether the run has saved, cannot be read",
    delete_settings_of_an_earlier_version: "config.yaml, which would show whether the run has saved, cannot be read",
    delete_steps: "latest names a checkpoint",
    damage_manifests: "step-00000002/manifest.json is damaged",
    delete_manifests: "step-00000004 is not a complete checkpoint: it has no manifest.json",
    damage_shards: f"{SHARD}: its SHA-256 does not match manifest.json",
    set_all_aside: "step-00000004.damaged was set aside as damaged",
}


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_a_run_without_a_sound_checkpoint_is_refused_and_all_stays(finished, run, lose):
    lose(run)
    message = refusal(finished, run)
    assert LOSSES[lose] in message
    assert f"this run has saved before, but no sound checkpoint is left in {run}/checkpoints" in message
    for way_out in ("from a backup", "run=...", f"move {run}/metrics.jsonl"):
        assert way_out in message


def test_the_refusal_is_that_of_all_ranks(finished, run):
    delete_checkpoints(run)
    says = "error on every rank: this run has saved before, but no sound checkpoint is left"
    assert refusal(finished, run, num_ranks=2).startswith(says)


def test_with_its_metrics_moved_away_it_begins_again_also_after_a_kill(finished, run):
    delete_checkpoints(run)
    (run / "metrics.jsonl").unlink()
    assert (run / "saved.json").exists()  # harmless on its own
    refuse_if_saved(run, LocalStore(run / "checkpoints"), {})
    (run / "metrics.jsonl").write_text('{"step": 1}\n')  # the new run is killed before it saves
    assert "started at step 0" in train(finished, run, "train.steps=1").out


@pytest.mark.parametrize("every", ["2", "null"])
def test_a_run_that_was_killed_before_or_in_its_first_save_begins_again(finished, run, every):
    delete_checkpoints_of_an_earlier_version(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("every: 2", f"every: {every}"))
    assert "started at step 0" in train(finished, run, "train.steps=1").out
    assert steps(run) == [1]


def test_the_newest_sound_one_is_taken_and_newer_ones_are_kept_aside(finished, run, caplog):
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000005")
    (checkpoints / "step-00000005" / "manifest.json").unlink()
    edit(checkpoints / "step-00000004" / SHARD)
    found = train(finished, run)
    assert found.code == 0, found
    assert caplog.text.count("step-00000005: it is not a complete checkpoint") == 1
    assert f"resumed from {checkpoints}/step-00000002 at step 2" in found.out
    assert "step-00000004 is kept as step-00000004.damaged" in found.out
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert (checkpoints / "step-00000004.damaged").is_dir()


def test_a_newer_damaged_one_stays_where_it_is_if_the_run_does_not_go_on(finished, run):
    edit(run / "checkpoints" / "step-00000004" / SHARD)
    assert "train.seed=1234" in refusal(finished, run, "train.seed=7")
    before = snapshot(run)
    assert "step-00000002 is at step 2, and train.steps is 2" in train(finished, run, "train.steps=2").out
    assert snapshot(run) == before


def test_a_stray_file_in_the_newest_one_is_no_damage(finished, run):
    newest = run / "checkpoints" / "step-00000004"
    for name in (".DS_Store", "readme.txt", "weights.pt"):
        (newest / name).write_bytes(b"\x80\x02}q\x00.")
    found = train(finished, run)
    assert (found.code, steps(run)) == (0, [1, 2, 3, 4, 5, 6])
    assert f"resumed from {newest} at step 4" in found.out
    assert (newest / "readme.txt").exists()


# ---- what has changed


def test_the_same_settings_are_told_nothing_but_where_they_go_on(finished, run):
    lines = train(finished, run).out.splitlines()
    assert lines[0] == f"resumed from {run}/checkpoints/step-00000004 at step 4, now in layout tp1 dp1"
    assert lines[1] == "changed since step 4: train.steps 4 -> 6"


def test_a_model_that_takes_long_to_build_is_announced_until_the_first_line(finished, run, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("megalith.cli.console.Announcer.begin", lambda _, what: said.append(what))
    monkeypatch.setattr("megalith.cli.console.Announcer.end", lambda _: said.append("ended"))
    monkeypatch.setattr("megalith.cli.console.Console.show", lambda _, line: said.append(line))
    train(finished, run)
    assert said[:2] == ["building the model, with initialized or loaded weights", "ended"]
    assert said[2].startswith("resumed from")


def test_held_out_data_that_are_refused_are_told_before_the_run_begins(finished, run, monkeypatch):
    def refuse(*_: object) -> None:
        raise DataError("labels must be below 3; got 7")

    monkeypatch.setattr("megalith.training.callbacks.HeldOutLoss.__init__", refuse)
    found = train(finished, run)
    assert (found.code != 0, found.out) == (True, "")
    assert "labels must be below 3" in found.err


def test_a_change_of_the_schedule_is_told_once(finished, run, caplog):
    changes = ("optim.schedule=linear", "optim.lr=0.002")
    with caplog.at_level("INFO"):
        found = train(finished, run, *changes)
    assert "optim.lr 0.001 -> 0.002, " in found.out
    assert "0.002" not in caplog.text


def test_changes_that_keep_the_promise_are_told_in_one_line(finished, run):
    changes = {
        "train.global_batch_size": ("8", "4"),
        "optim.lr": ("0.001", "0.002"),
        "optim.schedule": ('"constant"', '"linear"'),
        "precision.dtype": ('"float32"', '"bfloat16"'),
        "data.eod_mask_loss": ("true", "false"),
        "model.layernorm_epsilon": ("1e-05", "0.0001"),
    }
    found = train_on_two_ranks(finished, run, *(f"{name}={new}" for name, (_, new) in changes.items()))
    [line] = [line for line in found.splitlines() if line.startswith("changed since step 4: ")]
    for name, (old, new) in changes.items():
        assert f"{name} {old} -> {new}" in line
    for change in ("optim.decay_steps (not set) -> 6", "parallel.tensor 1 -> 2", "layout tp1 dp1 -> tp2 dp1"):
        assert change.replace("tp1 dp1 -> tp2 dp1", '"tp1 dp1" -> "tp2 dp1"') in line
    assert [record["consumed_samples"] for record in read_metrics(run)] == [8, 16, 24, 32, 36, 40]


@pytest.fixture(scope="module")
def other(finished):
    return write_dataset(finished / "other", seed=1)


def test_other_data_are_refused_with_the_way_out_which_works(finished, other, run, tmp_path):
    message = refusal(finished, run, f"data.train={other}")
    for part in (
        "the training data have changed: text ",
        "Continuing would repeat or skip text",
        f'data.train "{finished}/text" -> "{other}"'[:60],
        f"load={run}/checkpoints/step-00000004 run=...",
    ):
        assert part in message
    way_out = (f"load={run}/checkpoints/step-00000004", f"data.train={other}")
    assert "from the weights of" in train(finished, tmp_path / "elsewhere", *way_out, "train.steps=1").out


def test_all_that_breaks_the_promise_is_told_at_once_on_every_rank(finished, other, run):
    message = refusal(finished, run, f"data.train={other}", "data.seq_length=8", "train.seed=7", num_ranks=2)
    for part in (
        "tokens_per_sample 16 -> 8",
        "data.seq_length 16 -> 8",
        ", text ",
        "train.seed is 7",
        "train.seed=1234",
    ):
        assert part in message
    assert "rank" not in message.partition("cannot be resumed: ")[2][:6]


def test_another_tokenizer_is_refused_where_the_files_do_not_name_theirs(finished, run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps({"made": name}))
    found = []
    for num_steps, name in ((5, "a"), (6, "a"), (7, "b")):  # the checkpoint of step 4 records no tokenizer
        overrides = [f"run={run}", f"train.steps={num_steps}", f"data.tokenizer={tmp_path / name}"]
        found += ranks(1, go_on_with, finished / "settings.yaml", overrides)
    assert ["resumed from" in each for each in found] == [True, True, False]
    assert "the training data have changed: tokenizer " in found[2]


def test_the_same_data_in_another_place_are_the_same(finished, run, tmp_path):
    for file in finished.glob("text.*"):
        shutil.copy(file, tmp_path / file.name)
    (tmp_path / "text.json").unlink()
    found = train(finished, run, f"data.train={tmp_path / 'text'}")
    assert found.code == 0, found
    assert "changed since step 4: data.train " in found.out


def test_what_an_earlier_version_wrote_otherwise_is_no_change(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished)
    run = tmp_path / "run"
    assert "started at" in train(Path(), run, "data.train=text", "data.valid=text", "train.steps=1").out
    assert "changed since step 1: train.steps 1 -> 2" in train(Path(), run, "data.valid=text", "train.steps=2").out
    newest = run / "checkpoints" / "step-00000002"
    state = json.loads((newest / "state.json").read_text())
    assert state["settings"]["data"]["valid"] == str(finished / "text")
    # earlier versions stored paths as given, usually relative to a working folder that is still the same
    state["settings"]["data"] |= {"train": "text", "valid": "elsewhere"}
    # and had fewer settings
    del state["settings"]["checkpoint"]["keep_best"], state["settings"]["tracking"], state["settings"]["optim"]["adamw"]
    replace_listed(newest, "state.json", json.dumps(state).encode())
    [line] = [line for line in train(Path(), run, "train.steps=3").out.splitlines() if line.startswith("changed")]
    assert line == 'changed since step 2: data.valid "elsewhere" -> null, train.steps 2 -> 3'


@pytest.mark.parametrize(
    ("override", "change", "misfit"),
    [
        ("model.num_layers=2", "model.num_layers 1 -> 2, train.steps 4 -> 6", "missing: model.layers.1"),
        (
            "precision.dtype=float64",
            'train.steps 4 -> 6, precision.dtype "float32" -> "float64"',
            "the checkpoint has torch.float32",
        ),
        ("optim.name=sgd", 'train.steps 4 -> 6, optim.name "adamw" -> "sgd"', "unexpected: optimizer."),
    ],
)
def test_what_gives_other_tensors_is_refused_and_told_before_them(finished, run, override, change, misfit):
    message = refusal(finished, run, override)
    assert message.startswith(f"error: changed since step 4: {change}")
    assert misfit in message


def test_a_state_of_the_last_version_is_gone_on_from_and_its_silence_is_told(finished, run):
    newest = run / "checkpoints" / "step-00000004"
    state = json.loads((newest / "state.json").read_text())
    old = {name: state[name] for name in ("train", "scheduler", "loss_scale", "rng")} | {"version": 2}
    replace_listed(newest, "state.json", json.dumps(old).encode())
    found = train(finished, run)
    assert found.code == 0, found
    assert "by an earlier version without its data and settings, so these are not compared" in found.out
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_a_state_of_the_wrong_shape_is_one_message_on_every_rank(finished, run):
    newest = run / "checkpoints" / "step-00000004"
    state = json.loads((newest / "state.json").read_text())
    state["train"]["step"] = "4"
    replace_listed(newest, "state.json", json.dumps(state).encode())
    says = f'{newest}/state.json: train.step must be an integer from 0 to 100000000000000; got "4"; {WAY_OUT}'
    assert refusal(finished, run, num_ranks=2) == f"error on every rank: {says}"
    evaluated = here("eval", newest, "--data", finished / "text")
    assert (evaluated.code, evaluated.err) == (2, f"error: {says}\n")
    state["train"]["step"] = 5
    replace_listed(newest, "state.json", json.dumps(state).encode())
    assert "must match the folder's name; got 5" in refusal(finished, run)
