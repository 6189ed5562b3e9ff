"""megalith doctor: what a machine can train with; a part that does not work is found and named."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith import optional
from megalith.insight import doctor
from megalith.insight.doctor import Finding, examine
from tests.program import here


def found_in(folder: Path, num_ranks: int | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(num_ranks, folder, str)}


@pytest.fixture
def few(monkeypatch):
    """Without the checks that take seconds."""
    monkeypatch.setattr(doctor, "_CALLED", {})
    monkeypatch.setattr(doctor, "_ranks", lambda *_: Finding("ok", "ranks", ""))


def fail() -> None:
    raise AssertionError


def exchange_nothing(num_elements: int) -> float:
    if os.environ["RANK"] == "1":
        raise OSError("no network interface")
    return 1.0


def test_what_a_run_needs_is_checked_on_this_machine(tmp_path):
    ended = here("doctor", "--folder", tmp_path / "runs" / "later", "--operations")
    assert ended.code == 0, ended
    table, _, operations = ended.out.partition("\n\n")
    states = {line[8:23].strip(): line[:8].strip() for line in table.splitlines()}
    for name in ("machine", "versions", "torch", "operations", "ranks", "disk"):
        assert states[name] == "ok", table
    assert "norm, glu, attention, cross entropy, experts match their references in bfloat16" in table
    assert "2 ranks started in " in table
    assert f"64 MiB written to {tmp_path} at " in table
    assert operations.startswith("operation")
    assert [line for line in ended.err.splitlines() if line.startswith("checking")] == [
        "checking operations",
        "checking ranks",
        "checking disk",
    ]
    assert os.listdir(tmp_path) == []


def test_operations_that_compute_something_else_or_nothing_are_named(monkeypatch, tmp_path):
    norm, shapes = doctor._CALLED["norm"]
    wrong = {
        "off": (lambda x, w, backend: norm(x, w, backend=backend) * (1.0 if backend else 1.05), shapes),
        "nan": (lambda x, w, backend: norm(x, w, backend=backend) * (1.0 if backend else torch.nan), shapes),
        "right": (norm, shapes),
    }
    monkeypatch.setattr(doctor, "_CALLED", wrong)
    failed = doctor._operations(torch.device("cpu"))
    assert failed.state == "failed"
    assert failed.text == "off differs from its reference by 5.0%; nan differs from its reference by nan%"


def test_a_check_that_raises_fails_and_the_others_go_on(few, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_operations", lambda _: fail())
    found = found_in(tmp_path)
    assert found["operations"] == Finding("failed", "operations", "AssertionError: ")
    assert found["disk"].state == "ok"


def test_a_rank_that_cannot_join_is_named(few, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_CALLED", {})
    monkeypatch.setattr(doctor, "_exchange", exchange_nothing)
    found = found_in(tmp_path, 2)["ranks"]
    assert found.state == "failed"
    assert "rank 1" in found.text
    assert "no network interface" in found.text


def test_a_folder_that_cannot_be_written_is_named_and_the_program_ends_with_1(few, tmp_path):
    (tmp_path / "file").write_text("")
    ended = here("doctor", "--folder", tmp_path / "file")
    assert ended.code == 1
    [line] = [line for line in ended.out.splitlines() if line.startswith("failed")]
    assert str(tmp_path / "file") in line


def test_a_number_of_ranks_below_one_is_refused():
    ended = here("doctor", "--nproc", 0)
    assert (ended.code, ended.err) == (2, "error: --nproc (the number of ranks) must be at least 1; got 0\n")


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", "off"), ("2.11.0+cu130", "ok"), ("2.13.2", "ok"), ("2.14.0a0+git1", "off"), ("3.0.0", "off")],
)
def test_other_versions_of_torch_are_told(version, state, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor._torch().state == state


def test_a_missing_compiler_and_packages_are_told_with_the_command_that_installs_them(few, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "missing_compiler", lambda: "g++")
    monkeypatch.setattr(optional, "has", lambda package: package == "wandb")
    found = found_in(tmp_path)
    assert found["compiler"].text.startswith("g++ was not found; ")
    assert found["matplotlib"].text == "not installed; for drawing report.html: pip install 'megalith[report]'"
    assert found["tensorboard"].text.endswith("pip install 'megalith[tracking]'")
    assert "wandb" not in found
    assert "deep_ep" not in found
    assert "megatron" not in found


def test_each_gpu_is_told_and_a_container_with_little_shared_memory_fails(few, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: ((140 - 30 * number) << 30, 140 << 30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    monkeypatch.setattr(optional, "has_triton", lambda: False)
    first, second, triton, shm = doctor._devices()
    assert first.text == "NVIDIA H200, 140 GiB, compute capability 9.0"
    assert second.text == "NVIDIA H200, 140 GiB, 30.0 GiB of it in use, compute capability 9.0"
    assert (triton.state, shm.state) == ("failed", "failed")
    assert "pip install 'megalith[triton]'" in triton.text
    assert "--shm-size=1g" in shm.text


def test_ranks_that_add_up_something_else_are_an_error(monkeypatch):
    monkeypatch.setattr(doctor.dist, "all_reduce", lambda x: x.add_(1))
    with pytest.raises(RuntimeError, match=r"the sum over 1 ranks must be 1\.0; got 2\.0 to 2\.0"):
        doctor._exchange(4)
