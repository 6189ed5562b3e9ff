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
for axis in ("tp", "cp", "pp", "dp", "dp_cp", "ep", "etp", "edp"):
    assert (pg_collection.size(axis), pg_collection.rank(axis)) == (1, 0)
assert pg_collection.speaks_for_tokens
assert not dist.is_initialized()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_it_shows_sizes_above_one():
    assert repr(ProcessGroupCollection.single()) == "ProcessGroupCollection()"


@pytest.mark.parametrize("family", ["dense", "expert"])
@pytest.mark.parametrize("mesh", [ProcessGroupCollection.weight_mesh, ProcessGroupCollection.data_mesh])
def test_without_torch_distributed_there_is_no_mesh(mesh, family):
    with pytest.raises(TopologyError, match=r"need a device mesh.*start it under torchrun"):
        mesh(ProcessGroupCollection.single(), family)
