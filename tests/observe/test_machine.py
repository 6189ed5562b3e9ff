"""The description of the machine."""

import os
import platform

import numpy
import pytest
import torch

from megalith.observe import machine
from megalith.observe.machine import describe_machine


def test_versions_and_the_machine_are_those_at_hand():
    facts = describe_machine()
    assert facts["python"] == platform.python_version()
    # a wheel's own version may leave out the build, such as +cu130
    assert facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts["numpy"] == numpy.__version__
    assert 1 <= int(facts["cores"]) <= (os.cpu_count() or 1)
    assert all(facts.values())


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """The folder of control groups, including the file that says which of them this process is in."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def limit(folder, file, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(content)


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/slice/job\n", "0::/outside/of/this/container\n"])
def test_the_memory_is_that_of_the_container_where_it_has_less(own, groups):
    if own:
        (groups.parent / "own").write_text(own)
    whole = machine.memory_bytes()
    assert whole is not None
    assert whole > 2**28
    limit(groups, "memory.max", "max\n")
    assert machine.memory_bytes() == whole
    limit(groups, "memory.max", "123456\n")
    assert machine.memory_bytes() == 123456


def test_the_memory_is_that_of_the_job_and_of_what_is_around_it(groups):
    (groups.parent / "own").write_text("0::/slice/job/step\n")
    limit(groups / "slice", "memory.max", "5000\n")
    limit(groups / "slice/job", "memory.max", "4000\n")
    limit(groups / "slice/job/step", "memory.max", "max\n")
    limit(groups / "slice/other", "memory.max", "1000\n")
    assert machine.memory_bytes() == 4000


def test_the_memory_is_that_of_the_job_in_control_groups_of_version_1(groups):
    (groups.parent / "own").write_text("4:cpu,cpuacct:/slurm/job\n3:memory:/slurm/job\n")
    limit(groups / "memory", "memory.limit_in_bytes", "9223372036854771712\n")
    limit(groups / "memory/slurm/job", "memory.limit_in_bytes", "4000\n")
    limit(groups / "cpu,cpuacct/slurm/job", "memory.limit_in_bytes", "1000\n")
    assert machine.memory_bytes() == 4000


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_what_is_left_of_the_limit_with_file_caches_that_can_be_reclaimed(version, groups):
    own, folder = ("0::/job\n", groups) if version == 2 else ("3:memory:/job\n", groups / "memory")
    (groups.parent / "own").write_text(own)
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}[version]
    limit(folder / "job", f"memory.{names[0]}", "4000\n")
    assert machine.free_memory_bytes() == 4000  # what is in use is not known
    limit(folder / "job", f"memory.{names[1]}", "3900\n")
    assert machine.free_memory_bytes() == 100
    limit(folder / "job", "memory.stat", f"anon 3000\n{names[2]}inactive_file 700\n")
    assert machine.free_memory_bytes() == 800
    limit(folder, f"memory.{names[0]}", "500\n")  # that of the group around it
    limit(folder, f"memory.{names[1]}", "600\n")
    assert machine.free_memory_bytes() == 0


def test_cores_are_those_that_this_process_may_use():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert machine.num_cores() == len(before)
