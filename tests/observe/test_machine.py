"""What a run ran on."""

import os
import platform

import numpy
import torch

from megalith.observe.machine import describe_machine


def test_versions_and_the_machine_are_those_at_hand():
    facts = describe_machine()
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == numpy.__version__
    assert 1 <= int(facts["cores"]) <= (os.cpu_count() or 1)
    assert all(facts.values())
