"""Records what ranks exchange: every collective and message of a process group, by axis, kind and bytes."""

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.parallel.traffic import Collective, Traffic
from megalith.topology.group_options import GroupOptions

# torch's operators, below its Python functions, FSDP2 and DTensor -> our names for them
KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "all_reduce": "all_reduce",  # DTensor's
}
# functional-collective operators that communicate nothing
LOCAL = {"wait_tensor", "_wrap_tensor_autograd"}
# an axis is identified by the timeout of its group, because several axes may span the same ranks
TIMEOUTS = {
    "tp": ("tensor", timedelta(minutes=11)),
    "cp": ("context", timedelta(minutes=12)),
    "dp_replicate": ("replicate", timedelta(minutes=13)),
    "dp_shard-cp": ("shard", timedelta(minutes=14)),
    "dp": ("data", timedelta(minutes=15)),
    "ep": ("expert", timedelta(minutes=16)),
    "etp": ("expert_tensor", timedelta(minutes=17)),
    "edp_shard": ("edp_shard", timedelta(minutes=18)),
    "edp_replicate": ("edp_replicate", timedelta(minutes=19)),
    "edp": ("edp", timedelta(minutes=21)),
    "pp": ("pipeline", timedelta(minutes=22)),
    "embd": ("pipeline", timedelta(minutes=23)),
}
APART = {axes: GroupOptions(timeout=timeout) for axes, (_, timeout) in TIMEOUTS.items()}


class Recorder(TorchDispatchMode):
    """While entered, counts in ``found`` what is exchanged over groups of more than one rank, also in backward.

    The groups must come from a ``ParallelState`` with the options ``APART``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Traffic = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in LOCAL:
            self._note(KINDS[name], args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, args: Any) -> None:
        group = next(group for group in map(_group, args) if group is not None)
        num_bytes = max(sum(x.numel() * x.element_size() for x in tensors) for tensors in _tensors(args))
        if group.size() > 1:
            self.found[Collective(axis_of(group), kind, num_bytes)] += 1


def axis_of(group: dist.ProcessGroup) -> str:
    """The axis of a group of such a ``ParallelState``."""
    if group == dist.group.WORLD:
        return "world"
    found = {timeout: axis for axis, timeout in TIMEOUTS.values()}
    return found.get(group._get_backend(torch.device("cpu")).options._timeout, "another")


def _group(arg: Any) -> dist.ProcessGroup | None:
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    # functional collectives take the group's name, after the operation's
    return dist.distributed_c10d._resolve_process_group(arg) if isinstance(arg, str) and arg != "sum" else None


def _tensors(args: Any) -> Iterator[list[Tensor]]:
    """The input and the output of a collective, each as a list."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield [arg]
        elif isinstance(arg, list) and arg and isinstance(arg[0], Tensor):
            yield arg
