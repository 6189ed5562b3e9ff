"""megalith doctor: what a machine can train with; a part that does not work is found and named."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith import optional
from megalith.cli import doctor as cli
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
        "checking compiler",
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
    assert "alternatives" not in ended.out  # the table is for --operations


def test_a_number_of_ranks_below_one_is_refused():
    ended = here("doctor", "--nproc", 0)
    assert (ended.code, ended.err) == (2, "error: --nproc (the number of ranks) must be at least 1; got 0\n")


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", "off"), ("2.11.0+cu130", "ok"), ("2.13.2", "ok"), ("2.14.0a0+git1", "off"), ("3.0.0", "off")],
)
def test_other_versions_of_torch_are_reported(version, state, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor._torch().state == state


def test_a_missing_compiler_and_packages_are_reported_with_the_command_that_installs_them(few, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "why_no_compiler", lambda: "no C++ compiler (install g++)")
    monkeypatch.setattr(optional, "has", lambda package: package == "wandb")
    found = found_in(tmp_path)
    slower = "no C++ compiler (install g++); fused operations run slower, uncompiled"
    assert found["compiler"] == Finding("off", "compiler", slower)
    assert found["matplotlib"].text == "not installed; for drawing report.html: pip install 'megalith[report]'"
    assert found["tensorboard"].text.endswith("pip install 'megalith[tracking]'")
    assert "wandb" not in found
    assert "deep_ep" not in found
    assert "megatron" not in found


def test_each_gpu_is_reported_and_a_container_with_little_shared_memory_fails(few, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: ((140 - 30 * number) << 30, 140 << 30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    first, second, shm = doctor._devices()
    assert first.text == "NVIDIA H200, 140 GiB, compute capability 9.0"
    assert second.text == "NVIDIA H200, 140 GiB, 30.0 GiB of it in use, compute capability 9.0"
    assert shm.state == "failed"
    assert "--shm-size=1g" in shm.text
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [finding.name for finding in doctor._devices()] == ["gpu 0"]


def test_a_gpu_that_cannot_be_used_fails_and_the_others_are_reported(monkeypatch):
    def memory(number: int) -> tuple[int, int]:
        if number == 0:
            raise torch.AcceleratorError("CUDA error: device(s) is/are busy or unavailable")
        return 80 << 30, 80 << 30

    properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 30))
    busy = "AcceleratorError: CUDA error: device(s) is/are busy or unavailable"
    assert [*doctor._devices()] == [
        Finding("failed", "gpu 0", busy),
        Finding("ok", "gpu 1", "NVIDIA A100, 80.0 GiB, compute capability 8.0"),
    ]


def test_a_gpu_that_cannot_be_used_ends_no_other_check(few, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: fail())
    ended = here("doctor", "--folder", tmp_path, "--operations")
    states = {line[8:23].strip(): line[:8].strip() for line in ended.out.splitlines()}
    assert (states["gpu 0"], states["disk"]) == ("failed", "ok")
    assert "alternatives" not in ended.out
    assert (ended.code, "Traceback" in ended.err) == (1, False)


def test_without_a_gpu_the_line_says_why_cuda_has_none(monkeypatch):
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nUpdate it.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [gpu] = doctor._devices()
    assert gpu.state == "off"
    assert gpu.text.endswith("; The NVIDIA driver on your system is too old (found version 12020).")


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch, tmp_path):
    def fail_to_import(name: str) -> None:
        raise OSError(f"{name}: libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(cli, "import_module", fail_to_import)
    ended = here("doctor", "--folder", tmp_path)
    assert ended.code == 1
    reason = "OSError: torch: libcudart.so.13: cannot open shared object file"
    assert ended.out == f"failed  torch          cannot be imported: {reason}\n"


def test_a_compiler_that_cannot_build_fails(monkeypatch):
    monkeypatch.setattr(doctor, "why_no_compiler", lambda: None)
    monkeypatch.setattr(doctor, "why_not_compile", lambda: "torch.compile cannot build here (no Python.h)")
    found = doctor._compiler(torch.device("cpu"))
    assert found.state == "failed"
    assert found.text == "torch.compile cannot build here (no Python.h); fused operations run slower, uncompiled"


def test_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setattr(optional, "has_triton", lambda: False)
    found = doctor._compiler(torch.device("cuda"))
    assert found.state == "failed"
    assert "pip install 'megalith[triton]'" in found.text
    monkeypatch.setattr(optional, "has_triton", lambda: True)
    assert doctor._compiler(torch.device("cuda")).state == "ok"


def test_a_disk_that_returns_something_else_fails(few, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.LocalStore, "read", lambda *_: b"")
    found = found_in(tmp_path)["disk"]
    assert found.state == "failed"
    assert found.text.startswith(f"{tmp_path} does not return what was written to it")


def test_ranks_that_add_up_something_else_are_an_error(monkeypatch):
    monkeypatch.setattr(doctor.dist, "all_reduce", lambda x: x.add_(1))
    with pytest.raises(RuntimeError, match=r"the sum over 1 ranks must be 1\.0; got 2\.0 to 2\.0"):
        doctor._exchange(4)
