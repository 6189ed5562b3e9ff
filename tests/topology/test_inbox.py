"""inbox: with poisoned buffers, data that has not arrived or was never written reads as NaN."""

from collections.abc import Iterator

import pytest
import torch

from megalith.topology.inbox import Inbox, poison_buffers, poisons_buffers


@pytest.fixture
def poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    poison_buffers(True)
    yield
    poison_buffers(False)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poison")
def test_fresh_memory_reads_as_nan_and_of_integers_as_the_largest():
    assert poisons_buffers()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.empty(5, dtype=dtype).isnan().all()
        assert torch.ones(5, dtype=dtype).new_empty(3, 2).isnan().all()
    assert (torch.empty_like(torch.zeros(4, dtype=torch.int32)) == torch.iinfo(torch.int32).max).all()


@pytest.mark.usefixtures("poison")
def test_a_message_reads_as_nan_until_it_is_opened_although_it_has_arrived():
    inbox = Inbox.like(torch.zeros(3))
    inbox.landing.fill_(7.0)
    assert inbox.message.isnan().all()
    assert inbox.opened().tolist() == [7.0] * 3
    assert inbox.message is inbox.opened()


def test_otherwise_a_message_arrives_where_it_is_read():
    assert not poisons_buffers()
    memory = torch.zeros(3)
    inbox = Inbox.of(memory)
    assert inbox.landing is inbox.opened() is memory
