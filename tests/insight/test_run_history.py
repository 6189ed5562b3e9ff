"""Reading and summarizing a run's folder."""

import json
import math

import pytest

from megalith.errors import DataError
from megalith.insight.run_history import read_run
from megalith.observe.metrics import MetricsWriter
from tests.insight.run_folder import SETTINGS, record, write_run


def run_of(folder, *records):
    with MetricsWriter(folder, resumed_step=0) as metrics:
        for each in records:
            metrics.write(each)
    return read_run(folder)


def test_everything_in_a_folder_is_read(tmp_path):
    run = read_run(write_run(tmp_path / "my run"))
    assert run.name == "my run"
    assert (run.training[0]["step"], run.training[-1]["step"]) == (1, 730)
    assert [step for step, _ in run.evaluations] == [73 * n for n in range(1, 11)]
    assert run.settings == SETTINGS
    assert run.valid_loss == run.evaluation["valid_loss"] == 2.243
    assert run.about["parameters"] == 4_012_288
    assert len(run.samples) == 2


def timed(step, layout, seconds, time, **fields):
    return {"step": step, "loss": 1.0, "layout": layout, "step_seconds": seconds, "time": time, **fields}


def test_without_samples_json_the_newest_texts_of_training_are_shown(tmp_path):
    texts = [[{"prompt": "a", "text": f"b{step}"}] for step in range(3)]
    run = run_of(tmp_path, {"step": 1, "loss": 1.0}, *({"step": 1, "samples": text} for text in texts))
    assert run.samples == texts[-1]
    (tmp_path / "samples.json").write_text('[{"prompt": "c", "text": "d"}]')
    assert read_run(tmp_path).samples == [{"prompt": "c", "text": "d"}]


def test_energies_of_the_laps_are_added_up_and_damaged_ones_left_out(tmp_path):
    energies = [{"joules": 100.5}, {"joules": "?"}, {"watts": 3}, 7, None, {"joules": 1e6}]
    assert run_of(tmp_path, *(record(step, energy=each) for step, each in enumerate(energies, 1))).joules == 1_000_100.5


def test_phases_are_steps_in_a_row_under_one_layout_and_hold_medians(tmp_path):
    run = run_of(
        tmp_path,
        timed(10, "tp1 dp2", 1.0, {"data": 0.1, "forward": 0.8, "forward/attention": 0.5}),
        timed(20, "tp1 dp2", 30.0, {"data": 0.2, "forward": 1.0}),
        timed(40, "tp1 dp2", 3.0, {"data": 0.3, "forward": 1.6, "checkpoint": 0.0}),
        timed(50, "tp2 dp1", 2.0, {"data": 0.2}),
        timed(60, "tp1 dp2", 1.0, {}),
    )
    assert [(p.layout, p.first_step, p.last_step) for p in run.phases] == [
        ("tp1 dp2", 1, 40),
        ("tp2 dp1", 41, 50),
        ("tp1 dp2", 51, 60),
    ]
    assert run.phases[0].step_seconds == 3.0
    assert run.phases[0].time == {"data": 0.2, "forward": 1.0}
    assert run.step_seconds == 2.0
    assert run.seconds == pytest.approx(10 * 1.0 + 10 * 30.0 + 20 * 3.0 + 10 * 2.0 + 10 * 1.0)


def test_the_compiler_is_an_item_of_its_own_and_no_part_of_any_step(tmp_path):
    run = run_of(
        tmp_path,
        timed(1, "tp1 dp1", 41.0, {"compile": 40.0, "forward": 0.9}),
        timed(2, "tp1 dp1", 1.0, {"forward": 0.8}),
        {"step": 2, "valid_loss": 2.0, "time": {"evaluation": 3.0, "evaluation/reading": 1.0, "compile": 2.0}},
        timed(3, "tp1 dp1", 1.0, {"forward": 0.7}, between={"checkpoint": 0.5}),
    )
    assert run.time == {"training": 3.0, "compile": 42.0, "evaluation": 3.0, "checkpoint": 0.5}
    assert run.seconds == 48.5
    assert run.step_seconds == 1.0
    assert run.phases[0].step_seconds == 1.0
    assert run.phases[0].time == {"forward": 0.8}


def test_a_run_may_hold_losses_alone(tmp_path):
    run = run_of(tmp_path, {"step": 1, "loss": 7.5})
    assert (run.samples, run.evaluations, run.settings, run.about, run.valid_loss) == ([], [], "", {}, None)
    assert math.isnan(run.seconds)
    assert run.column("lr") == ([], [])
    assert run.last("tokens") is None
    assert [phase.layout for phase in run.phases] == [""]


def test_without_evaluation_json_the_last_evaluation_is_the_held_out_loss(tmp_path):
    run = run_of(tmp_path, record(1), {"step": 1, "valid_loss": 3.0}, record(2), {"step": 2, "valid_loss": 2.5})
    assert run.valid_loss == 2.5


def test_named_validation_sets_have_their_losses_in_order_of_steps(tmp_path):
    sets = [{"web": {"loss": 3.0}, "code": {"loss": 2.0}}, {"web": {"loss": 2.5}, "code": {"loss": math.nan}}]
    held_out = [{"step": step, "valid_loss": each["web"]["loss"], "valid_sets": each} for step, each in enumerate(sets)]
    run = run_of(tmp_path, record(1), *held_out)
    assert run.valid_sets["web"] == run.evaluations == [(0, 3.0), (1, 2.5)]
    assert str(run.valid_sets["code"]) == "[(0, 2.0), (1, nan)]"


def test_columns_keep_numbers_and_nan_and_pass_over_null(tmp_path):
    run = run_of(tmp_path, record(1, mfu=0.5), record(2), record(3, mfu=math.nan))
    steps, values = run.column("mfu")
    assert steps == [1, 3]
    assert str(values) == "[0.5, nan]"


@pytest.mark.parametrize("records", [[], [{"step": 1, "valid_loss": 2.0}]])
def test_a_run_without_a_training_record_is_refused(tmp_path, records):
    with pytest.raises(DataError, match=r"metrics\.jsonl must contain a record of at least one training step"):
        run_of(tmp_path, *records)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("samples.json", "{", r"samples\.json must be JSON; it cannot be read"),
        ("samples.json", "{}", r"samples\.json must contain a list; got {}; remove it"),
        ("evaluation.json", json.dumps([1]), r"evaluation\.json must contain an object; got \[1\]"),
        (
            "evaluation.json",
            '{"valid_loss": ' + "9" * 400 + "}",
            r"evaluation\.json must be JSON; it cannot be read \(integer of 400 digits",
        ),
        ("about.json", "[" * 100_000, r"about\.json must be JSON; it cannot be read"),
        ("about.json", "null", r"about\.json must contain an object; got None"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        run_of(tmp_path, record(1))
