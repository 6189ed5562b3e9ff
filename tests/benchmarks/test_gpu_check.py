"""All of ``make gpu-check`` at tiny sizes in the interpreter; deadlines, failures, and its record."""

import importlib
import json
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.gpu_check import correct, parts, sweeps
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.parts import PARTS, Part, run_parts
from benchmarks.gpu_check.record import Record
from benchmarks.restartable import _IMPORTED
from tests.fusions.harness import Case, first_of_each_operation
from tests.kernel_reports import in_interpreter

COMMANDS = {"tests", "train", "step", "experts", "moe-step", "peers"}  # parts that start a program, which takes seconds


@in_interpreter
def test_the_check_runs_at_tiny_sizes_and_keeps_every_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        parts, "_command", lambda record, part, name, command, *_, **__: record.add(part, {"item": name})
    )
    # enough time on any machine
    monkeypatch.setattr("sys.argv", ["gpu_check", "--tiny", "--budget", "60000", "--out", str(tmp_path)])
    main()
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"date", "commit", "device"} <= lines[0].keys()
    assert [line for line in lines if line.get("failure")] == []
    items = {part: [line["item"] for line in lines if line["part"] == part and "item" in line] for part in PARTS}
    assert items["machine"] == ["versions", "copy", "product", "empty launch"]
    assert items["correct"] == ["rms norm", "swiglu"]
    assert items["timing"] == ["rms norm, 0 MiB", "swiglu, bias, 0 MiB"]
    assert items["attention"] == ["D 16, Megalith", "D 16, math"]
    assert items["losses"] == ["cross entropy, Megalith", "linear + cross entropy, Megalith"]
    assert len(items["fp8"]) == 4
    errors = [line["error_dw"] for line in lines if line["part"] == "fp8" and "error_dw" in line]
    assert [round(error, 2) for error in errors] == [0.0, 0.04, 0.0]  # of a plain product, in 8 bits, and of both
    assert len(items["sweeps"]) == len(sweeps.SWEEPS)
    assert items["host"] == ["calls", "CUDA graph", "torch.compile"]
    assert all(items[part] for part in COMMANDS)
    judged = [line["contest"]["figures"]["Megalith"] for line in lines if "contest" in line]
    assert all(figures["failure"] is None and figures["both"] for figures in judged)
    page = file.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out
    assert "| rms norm | float32 | 0 |" in page


@pytest.fixture
def record(tmp_path) -> Record:
    return Record(tmp_path, "cuda", 600.0)


def test_a_part_that_fails_costs_itself_and_one_without_time_says_so(record, monkeypatch):
    found = {}

    def failing(*_: object) -> None:
        raise OSError("no disk")

    def waiting(record: Record, deadline: float, tiny: bool) -> None:
        found["seconds"] = deadline - time.monotonic()
        time.sleep(0.2)

    monkeypatch.setattr(parts, "PARTS", {"a": Part(failing, 10), "b": Part(waiting, 30), "c": Part(waiting, 30)})
    run_parts(record, ["a", "b", "c"], 0.1, True)
    assert record.of("a")[0]["failure"] == "OSError: no disk"
    assert [line.get("failure") for line in record.of("b")] == [None]
    assert record.of("c")[0]["failure"] == "not run: no time was left"


@pytest.mark.parametrize(("budget", "seconds"), [(600, 300), (30, 30), (60, 30)])
def test_a_part_may_take_more_where_more_is_left_than_was_planned(budget, seconds, record, monkeypatch):
    deadlines = []

    def part(record: Record, deadline: float, tiny: bool) -> None:
        deadlines.append(deadline - time.monotonic())

    monkeypatch.setattr(parts, "PARTS", {"a": Part(part, 30), "b": Part(part, 30)})
    run_parts(record, ["a", "b"], budget, True)
    assert deadlines[0] == pytest.approx(seconds, abs=2.0)


def test_a_command_that_fails_or_runs_on_has_its_last_words_in_the_record(record):
    deadline = time.monotonic() + 60
    parts._command(record, "tests", "failing", [sys.executable, "-c", "print('because'); exit(3)"], deadline)
    parts._command(record, "tests", "hanging", [sys.executable, "-c", "import time; time.sleep(60)"], time.monotonic())
    failing, hanging = record.of("tests")
    assert (failing["said"], failing["failure"]) == ("because", "ended with code 3")
    assert hanging["failure"] == "not done before its deadline"


def test_what_failed_runs_again_with_blocking_launches_and_under_the_sanitizer(record, monkeypatch):
    ran: dict[str, tuple[list[str], dict[str, str]]] = {}

    def command(record: Record, part: str, name: str, command: list[str], deadline: float, **environment: str) -> None:
        ran[name] = command, environment

    monkeypatch.setattr(parts, "_command", command)
    monkeypatch.setattr(parts.shutil, "which", lambda _: "sanitizer")
    record.add("correct", {"item": "rms norm", "failure": "AssertionError: far off"})
    record.add("correct", {"item": "layer norm", "checked": 4})
    parts._failures(record, time.monotonic() + 60, False)
    again, checked = ran
    assert (again, checked) == ("rms norm, blocking launches", "rms norm, memcheck")
    assert ran[again][1] == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert ran[checked][0][:3] == ["sanitizer", "--tool", "memcheck"]
    assert ran[again][0][-2:] == [
        "benchmarks.gpu_check.correct:case_is_right",
        json.dumps(["rms norm", [3, 4099], 4096, "cuda"]),
    ]


def test_every_operation_is_checked_by_the_sanitizer_and_some_for_races(record, monkeypatch):
    ran: dict[str, list[str]] = {}
    monkeypatch.setattr(parts, "_command", lambda record, part, name, command, *_, **__: ran.update({name: command}))
    monkeypatch.setattr(parts.shutil, "which", lambda _: None)
    parts._sanitizer(record, time.monotonic() + 60, False)
    assert [line["skipped"] for line in record.of("sanitizer")] == ["it is not installed, or there is no GPU"]
    monkeypatch.setattr(parts.shutil, "which", lambda _: "sanitizer")
    parts._sanitizer(record, time.monotonic() + 60, False)
    raced = [name for name in ran if "racecheck" in name]
    assert len(raced) == 3
    assert len(ran) - len(raced) == len(correct.items(False))
    assert ran["rms norm, memcheck"][:5] == ["sanitizer", "--tool", "memcheck", "--error-exitcode", "1"]
    assert json.loads(ran["rms norm, racecheck"][-1]) == ["rms norm", [3], 16385, "cuda"]


def test_every_setting_of_a_sweep_is_a_constant_of_its_module_and_is_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(sweeps, "kernels_timed", lambda *_: seen.append(values()) or {})
    monkeypatch.setattr(sweeps, "attention", lambda *_: seen.append(values()) or {})

    def values() -> dict[tuple[str, str], object]:
        return {(one.module, one.name): getattr(importlib.import_module(one.module), one.name) for one in settings}

    for name, sweep in sweeps.SWEEPS.items():
        for settings in sweep.settings:
            before = values()
            sweeps.swept(sweep.operations[0], json.loads(json.dumps(settings)), 1 << 12, "cpu", 1)
            assert values() == before, name
            for one in settings:
                now = seen[-1][one.module, one.name]
                assert (now if one.key is None else tuple(now[one.key])) == one.value, name


def test_what_is_imported_before_a_process_is_forked_asks_nothing_of_a_gpu():
    asking = (
        "import importlib, torch\n"
        "torch.cuda.is_available = torch.cuda.device_count = lambda: 1 / 0\n"
        "if hasattr(torch._C, '_cuda_getDeviceCount'):\n    torch._C._cuda_getDeviceCount = lambda: 1 / 0\n"
    )
    imports = "".join(f"importlib.import_module({name!r})\n" for name in [*_IMPORTED, "benchmarks.gpu_check.parts"])
    subprocess.run([sys.executable, "-c", asking + imports], check=True, cwd=parts._ROOT)


def test_without_a_gpu_only_the_tiny_form_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "there is no GPU; --tiny runs everything on a CPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kernels", "torchs", "as_far"), [(1e-7, 1e-5, 0), (1e-5, 8e-6, 2), (1e-5, 1e-6, None)])
def test_a_kernel_beyond_what_is_allowed_may_be_as_far_off_as_plain_torch(kernels, torchs, as_far, monkeypatch):
    """A result and a gradient with these relative errors, in float32."""
    off = {"triton": kernels, "reference": torchs}
    (fusion, *_) = (case.fusion for case in first_of_each_operation())
    case = Case(
        "off", fusion, lambda *_: {"x": torch.ones(3, 7)}, lambda x, backend: x * (1 + off[backend]), lambda x: x
    )
    monkeypatch.setattr(correct, "_cases", lambda: {"off": case})
    if as_far is None:
        with pytest.raises(AssertionError, match=r"off: 0: error of an entry is .* times that of plain torch"):
            correct.case_is_right("off", (3,), 7, "cpu")
    else:
        line = correct.case_is_right("off", (3,), 7, "cpu")
        assert line == {"checked": 1} | ({"as_far_as_torch": as_far} if as_far else {})
