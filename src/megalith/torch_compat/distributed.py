"""torch.distributed: collectives, process groups and FSDP2.

all_gather_single, reduce_scatter_single    new in 2.13, which deprecates all_gather_into_tensor, reduce_scatter_tensor
distributed_c10d._process_group_name        private; names a new process group
distributed_c10d._get_default_group()       private; its bound_device_id decides how NCCL groups are created
distributed_c10d._set_pg_timeout()          private; changes the timeout of a process group
FSDPModule._get_fsdp_state()                private; ends a backward manually
torch.distributed.fsdp...ReduceScatter      private; the base of custom reductions of FSDP2
distributed_c10d._abort_process_group       private; ends process groups that NCCL would wait for
torch.distributed._symmetric_memory         private; memory that other GPUs can read
torch.testing._internal...fake_pg           private; registers the process group whose collectives do nothing
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup, _symmetric_memory, distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = [
    "ReduceScatter",
    "abort_process_groups",
    "all_gather_into",
    "end_backward",
    "fake_ranks",
    "new_group",
    "reduce_scatter_into",
    "set_timeout",
    "symmetric_memory",
]

symmetric_memory = _symmetric_memory

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def abort_process_groups() -> None:
    """Aborts all NCCL process groups without waiting for collectives in flight."""
    distributed_c10d._abort_process_group()


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of ``world_size``; the other ranks do not exist, and collectives return at once."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=0, world_size=world_size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_gather_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [W n, ...] with the ``x`` [n, ...] of each rank of ``group``, in rank order; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _all_gather(out, x, group=group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [n, ...] with this rank's part of the sum of ``x`` [W n, ...] over ``group``; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _reduce_scatter(out, x, group=group)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Changes the timeout of later collectives over ``group``."""
    distributed_c10d._set_pg_timeout(timeout, group)


def end_backward(root: FSDPModule) -> None:
    """Runs FSDP2's end-of-backward work on ``root``, for gradients computed outside of a backward through it.

    torch calls this at the end of each backward. It handles every unit that has not been processed yet, here all of
    them.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def new_group(
    ranks: Sequence[int], backend: str | None, timeout: timedelta | None, pg_options: object | None
) -> ProcessGroup:
    """Returns a process group of ``ranks``, of the default group, created by these ranks alone.

    torch names a group by its ranks and the number of groups that this process has, and its members find each other
    under that name in the default group's store. If they have different numbers of other groups, they would wait for
    each other forever; if a group of the same ranks was destroyed, they would find its stale entries and fail to
    connect. Here the name consists of the ranks and how many groups these ranks have created, counted in that store.

    A default group that was initialized with ``device_id`` makes NCCL groups by splitting its communicator, in which
    all its ranks must take part, and connects them at once; all sends and receives of a group then share one stream,
    and wait for each other. Here the new group has its own communicators, and connects pairs of ranks separately.

    gloo connects here. A rank that has all its connections could destroy them while two others are still connecting,
    which would then fail; so all wait in the store for the last one. NCCL connects at the first collective.
    """
    text = hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()
    store = distributed_c10d._get_default_store()
    count = store.add(f"megalith/{text}/{dist.get_rank()}", 1)
    default = distributed_c10d._get_default_group()
    naming, bound = distributed_c10d._process_group_name, default.bound_device_id
    default.bound_device_id = None
    distributed_c10d._process_group_name = lambda *_, **__: distributed_c10d.GroupName(f"{text}-{count}")
    try:
        group: ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=pg_options, use_local_synchronization=True
        )
    finally:
        distributed_c10d._process_group_name = naming
        default.bound_device_id = bound
    if "gloo" in dist.get_backend_config(group):
        connected = f"megalith/{text}-{count}/connected"
        if store.add(connected, 1) == len(ranks):
            store.set(f"{connected}/all", "")
        store.wait([f"{connected}/all"], timeout or distributed_c10d.default_pg_timeout)
    return group
