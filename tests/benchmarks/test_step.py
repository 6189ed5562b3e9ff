"""benchmarks/step at its tiny size: both sides pass the gate, and who cannot run says why."""

from megalith.observe.flops import parameters

from benchmarks.measure import measure
from benchmarks.registry import CASES
from benchmarks.report import as_markdown

OURS, BASE = "Megalith, float32", "Hugging Face, bfloat16"


def test_ours_and_theirs_pass_the_gate_and_are_timed_in_turns():
    measurement = measure("step", "quick", 1, [OURS, BASE, "nobody"])
    assert measurement.entries[OURS].failure is None
    assert measurement.entries[OURS].first.gradient_error < 1e-5  # the judge is Hugging Face's model, in float32
    assert measurement.entries[BASE].failure is None
    assert measurement.entries["nobody"].failure == "KeyError: 'nobody'"
    assert all(one.seconds.keys() == {OURS, BASE} for one in measurement.rounds)
    assert len(measurement.calibration) == len(measurement.rounds) + 1
    assert "| nobody | not measured: KeyError" in as_markdown(measurement, {}, "today")


def test_the_full_size_is_the_one_of_27_7_million_parameters():
    size = CASES["step"].sizes["full"]
    assert (size.B, size.S) == (4, 512)
    # by hand: 6 * (4 * 512^2 + 3 * 512 * 1408 + 2 * 512) + 512 + 2 * 8192 * 512
    assert parameters(size.config, 8192) == 27_662_848
