"""benchmarks/step at its tiny size: both sides pass the check, and a contender that cannot run says why."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import calibration, worker
from benchmarks import measure as measure_module
from benchmarks.__main__ import contenders_of
from benchmarks.measure import measure
from benchmarks.registry import CASES
from benchmarks.report import as_markdown
from benchmarks.workers import Answer, WorkerError
from megalith.training.tasks.gpt_size import parameters

OURS, BASE = "Megalith, float32", "Hugging Face, bfloat16"


class WorkerHere:
    """Runs a worker's commands in this process, which saves the imports of five processes."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "serve", lambda commands: vars(self).update(commands=commands))
            worker.ROLES[arguments[0]](*arguments[1:])

    def ask(self, command: str, timeout: float) -> Answer:
        try:
            return {**self.commands[command](), "peak_rss": 1}
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """There is no process to end."""


@pytest.fixture(params=["here", pytest.param("processes", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "here":
        monkeypatch.setattr(measure_module, "Worker", WorkerHere)
        monkeypatch.setattr(calibration, "_N", 128)
        monkeypatch.setattr(calibration, "_COPY", 1 << 16)


@pytest.mark.usefixtures("workers")
def test_ours_and_theirs_pass_the_gate_and_are_timed_in_turns():
    measurement = measure("step", "quick", 1, [OURS, BASE, "nobody"])
    assert measurement.entries[OURS].failure is None
    assert measurement.entries[OURS].first.gradient_error < 1e-5  # the reference is Hugging Face's model, in float32
    assert measurement.entries[BASE].failure is None
    assert measurement.entries["nobody"].failure == "KeyError: 'nobody'"
    assert all(one.seconds.keys() == {OURS, BASE} for one in measurement.rounds)
    assert len(measurement.calibration) == len(measurement.rounds) + 1
    assert "| nobody | not measured: KeyError" in as_markdown(measurement, {}, "today")


@pytest.mark.usefixtures("workers")
def test_a_mixture_in_our_names_has_the_gradients_of_theirs_up_to_ties_in_bfloat16():
    names = [OURS, "Hugging Face, float32, grouped_mm", "Hugging Face, bfloat16, grouped_mm"]
    ours, theirs, base = (measure("moe-step", "quick", 1, names).entries[name] for name in names)
    assert [each.failure for each in (ours, theirs, base)] == [None] * 3
    assert max(ours.first.gradient_error, theirs.first.gradient_error) < 1e-5


@pytest.mark.usefixtures("workers")
def test_a_bert_of_theirs_in_bfloat16_passes_the_gate():
    theirs = "Hugging Face, bfloat16, eager"
    assert measure("bert-step", "quick", 1, [theirs]).entries[theirs].failure is None


@pytest.mark.slow  # it patches torch, so it needs a process, which imports Megatron-Core and compiles its fusions
@pytest.mark.parametrize(("case", "tolerance"), [("step", 0.02), ("moe-step", 0.2)])  # in bfloat16
@pytest.mark.parametrize("name", [name for name in CASES["step"].contenders if name.startswith("Megatron-Core")])
def test_megatron_core_gives_the_gradients_of_the_reference(name, case, tolerance):
    entry = measure(case, "quick", 1, [name]).entries[name]
    assert entry.failure is None
    assert entry.first.gradient_error < (1e-5 if "float32" in name else tolerance)


def test_one_dtype_leaves_out_who_computes_in_another_but_the_base():
    case = CASES["bert-step"]
    assert contenders_of(case, None) == list(case.contenders)
    assert contenders_of(case, "bfloat16") == [
        "Megalith, bfloat16",
        "Hugging Face, float32, sdpa",  # the base
        "Hugging Face, bfloat16, sdpa",
        "Hugging Face, bfloat16, eager",
        "Hugging Face, autocast bfloat16",
    ]


def test_the_full_size_is_the_one_of_27_7_million_parameters():
    size = CASES["step"].sizes["full"]
    assert (size.B, size.S) == (4, 512)
    # by hand: 6 * (4 * 512^2 + 3 * 512 * 1408 + 2 * 512) + 512 + 2 * 8192 * 512
    assert parameters(size.config, 8192) == 27_662_848
