"""Prepares batches: collates samples and moves them to the device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks.task import AnyTask

__all__ = ["collate_for", "inputs_for"]


def collate_for(task: AnyTask, pg_collection: ProcessGroupCollection) -> Callable[..., Any]:
    """Returns ``task.collate``, followed by taking this rank's part of the rows if they are split over cp."""
    rank, size = pg_collection.rank("cp"), pg_collection.size("cp")
    if size == 1:
        return task.collate

    def collate(*samples: Any) -> Any:
        return task.context_part(task.collate(*samples), rank, size)

    return collate


def inputs_for(
    task: AnyTask, micro_batches: Sequence[Any], step: int, device: torch.device, last: nn.Module
) -> Callable[[nn.Module, int], Any]:
    """Returns a cached ``task.inputs``: made once for all chunks of a rank, and dropped after the ``last`` chunk."""
    kept: dict[int, Any] = {}

    def inputs(chunk: nn.Module, index: int) -> Any:
        found = kept.pop(index) if index in kept else task.inputs(micro_batches[index], step, device)
        if chunk is not last:
            kept[index] = found
        return found

    return inputs
