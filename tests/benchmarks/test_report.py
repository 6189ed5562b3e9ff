"""benchmarks/report: the page for good rounds, for none, and for a contender without figures."""

import json

import pytest

from benchmarks.case import First
from benchmarks.measure import Entry, Measurement
from benchmarks.registry import CASES
from benchmarks.report import as_json, as_markdown
from benchmarks.rounds import Round

OURS, BASE, BROKEN = "Megalith, bfloat16", "Hugging Face, bfloat16", "Hugging Face, bfloat16, compiled"
RATES = {"float32": 0.3, "bfloat16": 2.0, "copy": 20.0}
MACHINE = {"cpu": "abacus", "threads": "2"}


@pytest.fixture
def measurement():
    entries = {
        OURS: Entry(First(1.25, 2e-5, 3e-2), peak_rss=1000 << 20),
        BASE: Entry(First(1.5, 3e-5, 4e-2), peak_rss=1400 << 20),
        BROKEN: Entry(failure="InvalidCxxCompiler: no g++ | no clang"),
    }
    rounds = [Round({OURS: 0.5, BASE: 0.75}, RATES, RATES) for _ in range(3)]
    return Measurement("step", "full", entries, [RATES] * 4, rounds)


def test_a_row_has_time_rate_ratio_memory_and_errors(measurement):
    table = as_markdown(measurement, MACHINE, "today")
    # 2048 tokens in 0.5 s; 2048 * (6 * 23,461,888 weights in matmuls + 3 * 2 * 512 * 512 * 6 in attention) FLOPs
    # = 307.6 GFLOP, so 0.615 TFLOP/s of 2.0
    assert f"| {OURS} | 500 | 4096 | 1.50 [1.50..1.50] | 31% | 1000 | 1.2 | 2.0e-05 | 3.0e-02 |" in table
    assert "3 rounds kept, 0 discarded" in table
    assert "Not to be quoted" not in table
    assert "cpu abacus, threads 2" in table


def test_a_contender_without_figures_says_why(measurement):
    assert f"| {BROKEN} | not measured: InvalidCxxCompiler: no g++ / no clang |" in as_markdown(
        measurement, MACHINE, "today"
    )


def test_discarded_rounds_do_not_count_and_are_reported(measurement):
    measurement.rounds.append(Round({OURS: 50.0, BASE: 75.0}, RATES, RATES | {"copy": 10.0}))
    table = as_markdown(measurement, MACHINE, "today")
    assert "3 rounds kept, 1 discarded" in table
    assert f"| {OURS} | 500 |" in table


def test_figures_of_a_machine_that_was_never_quiet_are_marked(measurement):
    measurement.rounds[:] = [Round({OURS: 0.5, BASE: 0.75}, RATES, RATES | {"copy": 10.0})]
    assert "**Not to be quoted**: the machine was not quiet in any of 1 rounds" in as_markdown(
        measurement, MACHINE, "today"
    )


def test_json_has_every_round_and_every_reason(measurement):
    tree = json.loads(json.dumps(as_json(measurement, MACHINE, "today")))
    assert [one["seconds"][OURS] for one in tree["rounds"]] == [0.5] * 3
    assert tree["contenders"][BROKEN]["failure"].startswith("InvalidCxxCompiler")
    assert tree["contenders"][OURS]["first"] == {"seconds": 1.25, "loss_error": 2e-5, "gradient_error": 3e-2}


@pytest.mark.parametrize(
    ("loss_error", "gradient_error", "reason"),
    [
        (9e-4, 9e-5, None),
        (1.1e-3, 0.0, "its loss is 1.1e-03"),
        (0.0, 1.1e-4, "a gradient is 1.1e-04"),
        (float("nan"), 0.0, "its loss is nan"),
        (0.0, float("nan"), "a gradient is nan"),
    ],
)
def test_a_contender_that_computes_something_else_gets_no_number(loss_error, gradient_error, reason):
    verdict = CASES["step"].verdict("Megalith, float32", First(1.0, loss_error, gradient_error))
    assert (reason is None and verdict is None) or reason in verdict
