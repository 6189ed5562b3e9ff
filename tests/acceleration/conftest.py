"""Graphs on a CPU, for tests of ``FullCudaGraph``."""

import pytest
import torch

from megalith.acceleration import full_cuda_graph
from tests.acceleration.operator_recorder import OperatorRecorder


@pytest.fixture
def recorders(monkeypatch) -> list[OperatorRecorder]:
    """The recorders of all graphs on the CPU."""
    made: list[OperatorRecorder] = []
    real = full_cuda_graph._recorder_on

    def recorder_on(device: torch.device) -> full_cuda_graph._Recorder | None:
        if device.type != "cpu":
            return real(device)
        made.append(OperatorRecorder())
        return made[-1]

    monkeypatch.setattr(full_cuda_graph, "_recorder_on", recorder_on)
    return made
