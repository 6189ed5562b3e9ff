"""Enters and leaves tensor-parallel regions, with or without sequence parallelism.

             forward / backward
    enter    sequence parallel: all-gather / reduce-scatter;  else: identity / all-reduce
    leave    sequence parallel: reduce-scatter / all-gather;  else: all-reduce / identity

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.parallel.traffic import Passes, collective
from megalith.topology.collectives import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

__all__ = ["enter_tensor_parallel", "enter_traffic", "leave_tensor_parallel", "leave_traffic"]


def enter_tensor_parallel(x: Tensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Maps [S/tp, B, H] (sequence parallel) or [S, B, H] to [S, B, H], the same on all ranks of ``tp_group``."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tp_group)
    return copy_to_tensor_model_parallel_region(x, tp_group)


def leave_tensor_parallel(x: Tensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Sums ``x`` [S, B, H] over ``tp_group`` and returns [S/tp, B, H] (sequence parallel) or [S, B, H]."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x, tp_group)
    return reduce_from_tensor_model_parallel_region(x, tp_group)


def enter_traffic(num_bytes: int, tp_size: int, sequence_parallel: bool) -> Passes:
    """Returns what ``enter_tensor_parallel`` exchanges for [S, B, H] of ``num_bytes``."""
    if sequence_parallel:
        gathered = collective("tensor", "all_gather", num_bytes, tp_size)
        return Passes(gathered, collective("tensor", "reduce_scatter", num_bytes, tp_size), unsaved=gathered)
    return Passes(backward=collective("tensor", "all_reduce", num_bytes, tp_size))


def leave_traffic(num_bytes: int, tp_size: int, sequence_parallel: bool) -> Passes:
    """Returns what ``leave_tensor_parallel`` exchanges for [S, B, H] of ``num_bytes``: forward and backward swapped."""
    enter = enter_traffic(num_bytes, tp_size, sequence_parallel)
    return Passes(enter.backward, enter.forward, unsaved=enter.backward)
