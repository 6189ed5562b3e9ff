"""Runs whose experts exchange tokens through (a stand-in for) DeepEP are built on all ranks or refused on all."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.errors import MissingDependencyError
from megalith.training.setup import build_run
from tests.parallel.expert.standin import StandInBuffer
from tests.rank_pool import RankError, ranks
from tests.tiny_run import settings


class Buffer(StandInBuffer):
    """Stands in for DeepEP's buffer, whose ranks exchange their memory handles when it is created."""

    sizes = SimpleNamespace(
        get_nvl_buffer_size_hint=lambda hidden_bytes, num_ranks: hidden_bytes * num_ranks,
        get_rdma_buffer_size_hint=lambda hidden_bytes, num_ranks: 0,
    )

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        super().__init__(group)
        self.num_bytes = num_nvl_bytes + num_rdma_bytes
        handles: list[Any] = [None] * group.size()
        dist.all_gather_object(handles, num_nvl_bytes, group=group)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> SimpleNamespace:
        return cls.sizes

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> SimpleNamespace:
        return cls.sizes


class Broken(Buffer):
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        if group.rank() == 1:
            raise AssertionError("CUDA error: invalid device context")
        super().__init__(group, num_nvl_bytes, num_rdma_bytes)


def run_of(folder: Any) -> dict[str, Any]:
    tree = settings(folder, model={"moe": {"num_experts": 4, "top_k": 2}}, precision={"dtype": "bfloat16"})
    return {**tree, "experimental": ["deep_ep"], "parallel": {"expert": 2, "dispatch": {"method": "flex"}}}


def build(tree: dict[str, Any], buffer: type[Buffer]) -> int:
    """The size of the buffer in bytes."""
    with patch.dict(sys.modules, deep_ep=SimpleNamespace(Buffer=buffer)):
        found = build_run(load_run(tree, world_size=2), torch.device("cpu")).options.fused_a2a
    return found.buffer.num_bytes


def test_the_buffer_is_of_bfloat16_rows_and_of_the_ranks_that_share_experts(tmp_path):
    tree = run_of(tmp_path)
    assert ranks(2, build, tree, Buffer) == [2 * tree["model"]["hidden_size"] * 2] * 2


def without_it_on_rank_1(tree: dict[str, Any]) -> str:
    # None: importing it raises ImportError
    module = SimpleNamespace(Buffer=Buffer) if dist.get_rank() == 0 else None
    with patch.dict(sys.modules, deep_ep=module), pytest.raises(MissingDependencyError) as caught:
        build_run(load_run(tree, world_size=2), torch.device("cpu"))
    return str(caught.value)


def test_where_one_rank_lacks_deep_ep_all_say_so_and_none_waits_for_it(tmp_path):
    for message in ranks(2, without_it_on_rank_1, run_of(tmp_path), timeout=20):
        assert message.startswith("rank 1: parallel.dispatch.method=flex needs deep_ep, which cannot be imported")


def test_an_unforeseen_error_of_the_buffer_ends_its_rank_at_once_and_keeps_its_type(tmp_path):
    with pytest.raises(RankError, match=r"rank 1(.|\n)*\n *AssertionError: CUDA error: invalid device context"):
        ranks(2, build, run_of(tmp_path), Broken, timeout=20)
