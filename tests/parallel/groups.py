"""The groups of a layout, for tests on ranks; and full tensors gathered from all ranks."""

import functools

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.parallel.local_ranges import Ranges, local_ranges
from megalith.parallel.parameters import declared_parameters
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState

# what a rank returns: which part of a tensor it holds, and the values
Part = tuple[Ranges, Tensor]


@functools.cache
def collection(tensor: int = 1, replicate: int = 1, context: int = 1, expert: int = 1) -> ProcessGroupCollection:
    """The groups of this rank; the ranks that tp, cp and replicate leave are sharded."""
    grid = RankGrid(dist.get_world_size(), tensor=tensor, replicate=replicate, context=context, expert=expert)
    return ParallelState(grid).collection()


def part(tensor: Tensor) -> Part:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_ranges(tensor), local.detach().clone()


def whole(tensor: Tensor) -> Tensor:
    """The unsharded tensor, with partial sums added up; every rank of its mesh must call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def load_(model: nn.Module, full: dict[str, Tensor]) -> None:
    """Loads this rank's part of ``full`` into each declared parameter of ``model``."""
    for name, parameter, _ in declared_parameters(model):
        values = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()
        values.copy_(slice_of(full[name], local_ranges(parameter)))


def slice_of(tensor: Tensor, ranges: Ranges) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in ranges)]
