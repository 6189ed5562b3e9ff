"""process_groups_config: the collection of a single process, which needs no process group."""

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


class Alone:
    """A process group's size and rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


@pytest.mark.parametrize(("output_rank", "speaks"), [(None, [False, False, True]), (0, [True, False, False])])
def test_of_a_pipeline_the_rank_with_the_last_stage_speaks(output_rank, speaks):
    found = [ProcessGroupCollection(pp=Alone(3, rank), output_rank=output_rank) for rank in range(3)]
    assert [each.speaks_for_tokens for each in found] == speaks
    second = ProcessGroupCollection(pp=Alone(3, 0), tp=Alone(2, 1), output_rank=output_rank)
    assert not second.speaks_for_tokens, "the second of tp"


@pytest.mark.parametrize("family", ["dense", "expert"])
@pytest.mark.parametrize("mesh", [ProcessGroupCollection.weight_mesh, ProcessGroupCollection.data_mesh])
def test_without_torch_distributed_there_is_no_mesh(mesh, family):
    with pytest.raises(TopologyError, match=r"need a device mesh.*start the process with torchrun"):
        mesh(ProcessGroupCollection.single(), family)
