"""process_group: created for a run and destroyed with it; after an error without waiting for other ranks."""

import pytest
import torch
import torch.distributed as dist

from megalith.training import process_group as module
from megalith.training.process_group import process_group
from tests.rank_pool import fork_context


class Groups:
    """Stands in for torch.distributed; records the calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.exists = False
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(dist, "is_initialized", lambda: self.exists)
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: self.call(backend, exists=True))
        monkeypatch.setattr(dist, "destroy_process_group", lambda: self.call("destroyed", exists=False))
        monkeypatch.setattr(module, "abort_process_groups", lambda: self.call("aborted", exists=False))

    def call(self, name: str, *, exists: bool) -> None:
        self.calls.append(name)
        self.exists = exists


@pytest.mark.parametrize(
    ("device", "raises", "calls"),
    [
        ("cuda", False, ["nccl", "destroyed"]),
        ("cuda", True, ["nccl", "aborted"]),
        ("cpu", False, ["gloo", "destroyed"]),
        ("cpu", True, ["gloo", "destroyed"]),
    ],
)
def test_after_an_error_collectives_of_nccl_are_not_waited_for(device, raises, calls, monkeypatch):
    groups = Groups(monkeypatch)
    try:
        with process_group(torch.device(device)):
            if raises:
                raise KeyError("unforeseen")
    except KeyError:
        assert raises
    assert groups.calls == calls


def test_the_device_is_set_for_a_group_that_exists_already(monkeypatch):
    groups, devices = Groups(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    groups.exists = True
    with process_group(torch.device("cuda", 3)):
        pass
    assert devices == [torch.device("cuda", 3)]
    assert groups.calls == []


def abort() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module.abort_process_groups()
    raise SystemExit(1 if dist.is_initialized() else 0)


def test_no_process_group_is_left_after_an_abort():
    process = fork_context().Process(target=abort)
    process.start()
    process.join()
    assert process.exitcode == 0
