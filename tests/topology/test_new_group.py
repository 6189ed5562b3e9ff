"""new_group returns once all members are connected, so that any of them may destroy it at once."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from megalith.torch_compat import distributed
from tests.rank_pool import ranks


def _after_the_slow_one() -> bool:
    """Whether rank 0's group, which connects half a second later, was connected when this rank's call returned."""
    store = distributed_c10d._get_default_store()
    connect: Callable[..., ProcessGroup] = dist.new_group

    def connect_slowly(*args: object, **kwargs: object) -> ProcessGroup:
        group = connect(*args, **kwargs)
        if dist.get_rank() == 0:
            time.sleep(0.5)
            store.set("slow/connected", "")
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.dist, "new_group", connect_slowly)
        group = distributed.new_group(range(4), None, None, None)
    connected = store.check(["slow/connected"])
    dist.destroy_process_group(group)
    return connected


def test_no_member_has_the_group_before_all_are_connected() -> None:
    assert ranks(4, _after_the_slow_one) == [True] * 4


def _bound_device_while_a_group_is_made() -> tuple[object, object]:
    """The device that the default group is bound to while a group is made, and afterwards."""
    default, found = distributed_c10d._get_default_group(), []
    make: Callable[..., ProcessGroup] = dist.new_group

    def make_noting_device(*args: object, **kwargs: object) -> ProcessGroup:
        found.append(default.bound_device_id)
        return make(*args, **kwargs)

    bound = default.bound_device_id
    default.bound_device_id = torch.device("cuda:1")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed.dist, "new_group", make_noting_device)
            dist.destroy_process_group(distributed.new_group(range(2), None, None, None))
        return found[0], default.bound_device_id
    finally:
        default.bound_device_id = bound


def test_a_bound_default_group_is_not_split_which_would_need_all_its_ranks() -> None:
    assert ranks(2, _bound_device_while_a_group_is_made) == [(None, torch.device("cuda:1"))] * 2
