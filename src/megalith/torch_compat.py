"""The one place that knows which torch is installed: names that differ between torch 2.11 and 2.13.

all_gather_single, reduce_scatter_single    new in 2.13, which warns of all_gather_into_tensor, reduce_scatter_tensor
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["all_gather_into", "reduce_scatter_into"]

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def all_gather_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [W n, ...] with the ``x`` [n, ...] of each rank of ``group``, in its order; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _all_gather(out, x, group=group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [n, ...] with this rank's part of the sum over ``group`` of ``x`` [W n, ...]; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _reduce_scatter(out, x, group=group)
