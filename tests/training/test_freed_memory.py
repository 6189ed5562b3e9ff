"""freed_memory: memory freed between live tensors is returned to the system once there is much of it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megalith.training.freed_memory import FreedMemory, _held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc gives memory back on request")
NUM, BYTES = 4000, 1 << 16
HOLES = NUM // 2 * BYTES


def in_pieces() -> list[torch.Tensor]:
    """Every second one of many tensors: the gaps between them add up to as much, but nothing larger fits in any."""
    return [torch.ones(BYTES, dtype=torch.uint8) for _ in range(NUM)][::2]


def run_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device))


def test_free_memory_in_pieces_is_given_back():
    freed = FreedMemory(run_on("cpu"))
    freed.usual = 1  # so that any growth counts as much
    living = in_pieces()
    held = _held()
    freed.on_step(run_on("cpu"), None)
    assert held - _held() > 0.9 * HOLES
    assert all(bool(tensor.all()) for tensor in living)


def test_pages_are_given_back_after_the_first_step_and_never_if_the_process_does_not_grow():
    freed = FreedMemory(run_on("cpu"))
    calls, seen = [], []
    freed.trim = calls.append
    for _ in range(4):
        freed.on_step(run_on("cpu"), None)
        seen.append(len(calls))
    assert seen == [1, 1, 1, 1]


def test_steps_that_came_to_need_more_give_pages_back_once_and_not_each_time():
    freed = FreedMemory(run_on("cpu"))
    calls = []
    freed.trim, freed.usual = calls.append, _held() // 2
    for _ in range(3):
        freed.on_step(run_on("cpu"), None)
    assert len(calls) == 1


def test_a_gpu_is_left_to_its_own_allocator():
    assert FreedMemory(run_on("cuda")).trim is None
