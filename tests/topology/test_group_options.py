"""group_options: options are checked when given, and reach torch in torch's own form."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megalith.errors import TopologyError
from megalith.topology.group_options import GroupOptions, NCCLOptions
from megalith.topology.parallel_state import ParallelState
from megalith.topology.rank_grid import RankGrid
from tests.rank_pool import ranks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "smoke"}, r"backend must be available in this build of torch, .*; got 'smoke'"),
        ({"backend": "cpu:gloo,cuda:smoke"}, r"got 'smoke'"),
        ({"backend": ""}, r"got ''"),
        ({"timeout": timedelta(0)}, r"timeout must be positive; got 0.0 s"),
        ({"timeout": timedelta(seconds=-1)}, r"got -1.0 s"),
        (
            {"backend": "gloo", "nccl": NCCLOptions()},
            r"nccl options need the nccl backend; this group's backend is gloo; leave",
        ),
        (
            {"nccl": NCCLOptions()},
            r"this group's backend is none, before init_process_group; leave them out, or set backend=",
        ),
    ],
)
def test_options_that_no_group_can_have_are_refused(given, message):
    with pytest.raises(TopologyError, match=message):
        GroupOptions(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cga_cluster_size": 9}, r"cga_cluster_size must be in \[0, 8\] .*; got cga_cluster_size=9"),
        ({"cga_cluster_size": -1}, r"got cga_cluster_size=-1"),
        ({"min_ctas": 0}, r"1 <= min_ctas <= max_ctas; got .*min_ctas=0, max_ctas=None"),
        ({"min_ctas": 8, "max_ctas": 4}, r"min_ctas=8, max_ctas=4"),
        ({"net_name": "ethernet"}, r"net_name must be 'IB' or 'Socket'; got 'ethernet'"),
    ],
)
def test_nccl_options_out_of_range_are_refused(given, message):
    with pytest.raises(TopologyError, match=message):
        NCCLOptions(**given)


def test_nccl_is_told_what_was_given_and_nothing_else(monkeypatch):
    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    given = NCCLOptions(cga_cluster_size=0, max_ctas=16, net_name="IB", high_priority_stream=True)
    options = given.for_torch(timedelta(minutes=3))
    assert options.is_high_priority_stream
    assert vars(options.config) == {"cga_cluster_size": 0, "max_ctas": 16, "net_name": "IB"}
    assert options._timeout == timedelta(minutes=3)
    assert vars(NCCLOptions(min_ctas=2).for_torch(None).config) == {"min_ctas": 2}


def test_a_group_of_nccl_may_have_nccl_options(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == "nccl")
    assert GroupOptions(backend="cuda:nccl", nccl=NCCLOptions()).nccl == NCCLOptions()


def asked_of_torch() -> list[tuple[Any, ...]]:
    """The arguments with which a group of both ranks is created, if torch has NCCL."""
    asked: list[tuple[Any, ...]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.config = SimpleNamespace()

    def new_group(ranks: list[int], backend: str, timeout: timedelta, pg_options: Any) -> object:
        asked.append((ranks, backend, timeout, vars(pg_options.config)))
        return object()

    with (
        patch.object(dist, "is_backend_available", lambda backend: backend in ("nccl", "gloo")),
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
        patch("megalith.topology.rank_groups.new_group", new_group),
    ):
        options = GroupOptions(backend="cuda:nccl", timeout=timedelta(minutes=2), nccl=NCCLOptions(max_ctas=16))
        ParallelState(RankGrid(2, tensor=2), group_options={"tp": options}).group("tp")
    return asked


def test_backend_timeout_and_nccl_options_of_a_group_reach_torch():
    want = ([0, 1], "cuda:nccl", timedelta(minutes=2), {"max_ctas": 16})
    assert ranks(2, asked_of_torch) == [[want]] * 2
