"""What a run ran on."""

import os
import platform

import numpy
import torch

from megalith.observe import machine
from megalith.observe.machine import describe_machine


def test_versions_and_the_machine_are_those_at_hand():
    facts = describe_machine()
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == numpy.__version__
    assert 1 <= int(facts["cores"]) <= (os.cpu_count() or 1)
    assert all(facts.values())


def test_the_memory_is_that_of_the_container_where_it_has_less(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_LIMIT", limit)
    whole = machine.memory_bytes()
    assert whole is not None
    assert whole > 2**28
    limit.write_text("max\n")
    assert machine.memory_bytes() == whole
    limit.write_text("123456\n")
    assert machine.memory_bytes() == 123456
