"""new_group returns once all members are connected, and does not split the default group; groups apart from an axis."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from megalith.topology.group_options import GroupOptions
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
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


def other_groups() -> list[object]:
    options = {"pp": GroupOptions(timeout=timedelta(minutes=3)), "embd": GroupOptions(timeout=timedelta(minutes=4))}
    state = ParallelState(RankGrid(2, pipeline=2), timeout=timedelta(minutes=5), group_options=options)
    made = [state.another_group(state.ranks("pp"), axes) for axes in ("pp", "pp", "embd", "dp")]
    assert len({id(group) for group in (*made, state.group("pp"))}) == 5
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for group in made]
    state.destroy()
    left = [group for group in made if group in dist.distributed_c10d._world.pg_map]
    return [*found, len(left)]


def test_another_group_has_the_options_of_its_axes_and_is_destroyed_with_the_others() -> None:
    assert ranks(2, other_groups) == [[3.0, 3.0, 4.0, 5.0, 0]] * 2
