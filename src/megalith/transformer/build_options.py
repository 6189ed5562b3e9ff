"""How a model is built, apart from its shape: what every constructor of the house hands down."""

from dataclasses import dataclass

import torch

from megalith.acceleration.recompute import Recompute
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["BuildOptions"]


@dataclass(frozen=True)
class BuildOptions:
    """The groups to split over, the dtype of parameters, and what a layer keeps of its activations.

    ``sequence_parallel``: activations between layers are [S/tp, B, H]. Without tp there is nothing to split, and it is
    off. ``recompute``: "full": each layer again in backward; "selective": its attention alone.
    """

    pg_collection: ProcessGroupCollection
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence_parallel", self.sequence_parallel and self.pg_collection.tp_size > 1)
