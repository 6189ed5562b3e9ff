"""process_groups_config: a collection of one process, which needs nothing."""

import subprocess
import sys

import pytest

from megalith.errors import TopologyError
from megalith.topology.process_groups_config import ProcessGroupCollection


def test_one_process_needs_no_torch_distributed():
    code = """
import torch.distributed as dist
from megalith.topology.process_groups_config import ProcessGroupCollection
pg_collection = ProcessGroupCollection.single()
assert (pg_collection.tp_size, pg_collection.tp_rank, pg_collection.dp_size, pg_collection.dp_rank) == (1, 0, 1, 0)
assert not dist.is_initialized()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_it_shows_sizes():
    assert repr(ProcessGroupCollection.single()) == "ProcessGroupCollection(tp=1, dp=1)"


@pytest.mark.parametrize("name", ["tp_mesh", "dp_mesh"])
def test_without_torch_distributed_there_is_no_mesh(name):
    with pytest.raises(TopologyError, match=r"need a device mesh.*start it under torchrun"):
        getattr(ProcessGroupCollection.single(), name)
