"""Dashboards: they hold what they were given, and the failure of one affects nothing else."""

import json
import re
import sqlite3
import time

import pytest

from megalith import optional
from megalith.observe import trackers as module
from megalith.observe.trackers import Trackers

SETTINGS = {"model": {"num_layers": 2, "rope": None}, **{f"field{number}": number for number in range(150)}}


def write(folder, names, *records, resumed_step=0):
    trackers = Trackers(folder, names, resumed_step=resumed_step, settings=SETTINGS)
    for record in records:
        trackers.write(record)
    trackers.close()


TEXTS = {"step": 2, "samples": [{"prompt": "Once", "text": " upon\na time"}, {"prompt": "The", "text": " end"}]}
STEPS = (
    {"step": 1, "loss": -1.5, "layout": "tp1", "mfu": None, "time": {"data": 0.25}},
    {"step": 2, "loss": 7.0},
)

LAYERS = [
    {"layer": 1, "max_violation": 1.0, "entropy": 0.7, "dead_experts": 1, "losses": {"z_loss": None}, "load": [2, 0]},
    {
        "layer": 3,
        "max_violation": 0.5,
        "entropy": 0.6,
        "dead_experts": 0,
        "losses": {"z_loss": 2.0},
        "load": [0.5, 1.5],
    },
]
EXPERTS = {"step": 2, "loss": 7.0, "experts": {"max_violation": 1.0, "layers": LAYERS}}


def test_tensorboard_reads_the_scalars_and_resumed_steps_replace_lost_ones(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, ["tensorboard"], *STEPS)
    time.sleep(1.0 - time.time() % 1.0)  # files of the same second are ordered by a number that is compared as text
    write(tmp_path, None, {"step": 2, "loss": -2.5}, resumed_step=1)  # installed, so it is the default
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "time/data"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, -1.5), (2, -2.5)]
    assert [event.value for event in events.Scalars("time/data")] == [0.25]


def test_tensorboard_has_the_texts_of_a_step(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, ["tensorboard"], *STEPS, TEXTS)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    texts = {tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in found[tag]] for tag in found}
    assert texts == {
        "samples/0/text_summary": [(2, "    Once upon\n    a time")],
        "samples/1/text_summary": [(2, "    The end")],
    }


def test_tensorboard_has_the_numbers_of_each_layer_of_experts_and_a_histogram_of_its_loads(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, ["tensorboard"], EXPERTS)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"] if tag.startswith("experts/")}
    assert scalars == pytest.approx(
        {
            "experts/max_violation": 1.0,
            "experts/layer-1/max_violation": 1.0,
            "experts/layer-1/entropy": 0.7,
            "experts/layer-1/dead_experts": 1,
            "experts/layer-3/max_violation": 0.5,
            "experts/layer-3/entropy": 0.6,
            "experts/layer-3/dead_experts": 0,
            "experts/layer-3/losses/z_loss": 2.0,
        }
    )
    bins = {}
    for tag in events.Tags()["histograms"]:
        [event] = events.Histograms(tag)
        assert event.step == 2
        bins[tag] = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
    # by the right edge of each bin: expert 0 is in 0 to 1
    assert bins == {"experts/layer-1/load": {1.0: 2.0, 2.0: 0.0}, "experts/layer-3/load": {1.0: 0.5, 2.0: 1.5}}


@pytest.mark.slow  # seconds to import and to start
@pytest.mark.filterwarnings("ignore")  # emitted by the package about itself
def test_mlflow_keeps_the_numbers_and_the_settings_in_the_runs_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", ["mlflow"], *STEPS, TEXTS)
    write(tmp_path / "run", ["mlflow"], {"step": 2, "loss": -2.5, "experts": {"layers": LAYERS[1:]}}, resumed_step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    [file] = tmp_path.glob("run/mlartifacts/*/artifacts/samples/step-00000002.txt")
    assert file.read_text() == "Once upon\na time\n\nThe end"
    database = sqlite3.connect(tmp_path / "run" / "mlflow.db")
    metrics = database.execute("select name, key, value, step from metrics join runs using (run_uuid)").fetchall()
    assert sorted(metrics) == [
        ("run", "loss", -1.5, 1),
        ("run", "loss", 7.0, 2),
        ("run", "time/data", 0.25, 1),
        ("run from step 1", "experts/layer-3/dead_experts", 0.0, 2),
        ("run from step 1", "experts/layer-3/entropy", 0.6, 2),
        ("run from step 1", "experts/layer-3/losses/z_loss", 2.0, 2),
        ("run from step 1", "experts/layer-3/max_violation", 0.5, 2),
        ("run from step 1", "loss", -2.5, 2),
    ]
    parameters = dict(database.execute("select key, value from params join runs using (run_uuid) where name = 'run'"))
    assert parameters == {"model.num_layers": "2", "model.rope": "None"} | {f"field{n}": str(n) for n in range(150)}
    assert database.execute("select distinct status from runs").fetchall() == [("FINISHED",)]


@pytest.mark.slow  # seconds to import and to start
@pytest.mark.filterwarnings("ignore")  # emitted by the package about itself
def test_weights_and_biases_writes_an_offline_run_into_the_runs_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # nothing is sent anywhere, whatever the environment says
    write(tmp_path / "run", ["wandb"], *STEPS, TEXTS, EXPERTS | {"step": 3})
    [file] = tmp_path.glob("run/wandb/offline-run-*/run-*.wandb")
    for pattern in (
        rb"time/data",
        rb"experts/layer-3/losses/z_loss",
        rb"experts/layer-3/load.{1,4}values.{1,6}\[0\.5, ?1\.5\]",
        rb"experts/layer-3/load.{1,4}bins.{1,6}\[0, ?1, ?2\]",
    ):
        ends = time.monotonic() + 20.0  # another process writes the file
        while not re.search(pattern, file.read_bytes(), re.S):
            assert time.monotonic() < ends, pattern
            time.sleep(0.05)
    [table] = file.parent.glob("files/media/table/samples_*.table.json")
    assert json.loads(table.read_text())["data"] == [["Once", " upon\na time"], ["The", " end"]]


def test_without_packages_and_without_a_wish_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(optional, "has", lambda package: False)
    write(tmp_path, None, *STEPS)
    assert list(tmp_path.iterdir()) == []


class Fails:
    """A dashboard that fails on request."""

    def __init__(self, where):
        self.where, self.logged = where, 0
        self.fail("open")

    def fail(self, where):
        if where == self.where:
            raise OSError(28, "No space left on device")

    def log(self, step, scalars):
        self.fail("log")
        self.logged += 1

    def close(self):
        self.fail("close")


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_one_that_fails_is_given_up_with_one_warning_and_the_others_go_on(tmp_path, monkeypatch, caplog, where):
    sound = Fails("nowhere")
    made = {"tensorboard": lambda *_: Fails(where), "mlflow": lambda *_: sound}
    monkeypatch.setattr(module, "TRACKERS", made)
    write(tmp_path, ["tensorboard", "mlflow"], *STEPS)
    assert sound.logged == 2
    [warning] = caplog.messages
    assert warning.startswith("tensorboard is disabled for the rest of this run, which continues: OSError: ")
    assert "No space left" in warning


def test_an_interrupt_is_not_held_back(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "TRACKERS", {"mlflow": interrupted})
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, ["mlflow"])
