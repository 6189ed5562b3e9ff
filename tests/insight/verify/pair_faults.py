"""Seeded faults that show only if two axes are combined, one for each pair of axes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from megalith.models.gpt_model import GPTModel
from megalith.parallel.context.attention import context_attention
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.tensor import regions
from megalith.topology import collectives
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer import dot_product_attention

__all__ = ["PAIR_FAULTS", "Fault"]

Fault = Callable[[], Any]


def reduce_over_all_ranks_for_those_of_tp() -> Any:
    def reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        everybody = None if group is None else torch.distributed.group.WORLD
        return collectives.reduce_from_tensor_model_parallel_region(x, everybody)

    return patch.object(regions, "reduce_from_tensor_model_parallel_region", reduce)


def forget_which_heads_a_rank_has_where_rows_are_split() -> Any:
    def without_offset(*operands: Any, head_offset: int, **options: Any) -> torch.Tensor:
        return context_attention(*operands, head_offset=0, **options)

    return patch.object(dot_product_attention, "context_attention", without_offset)


def sum_tied_embeddings_once_for_each_rank_of_tp() -> Any:
    add = Pipeline._sum_shared_gradients

    def repeated(self: Pipeline[Any]) -> None:
        add(self)
        for weight, _ in self.shared:
            if isinstance(weight.grad, DTensor) and "tp" in (weight.grad.device_mesh.mesh_dim_names or ()):
                weight.grad.to_local().mul_(weight.grad.device_mesh["tp"].size())

    return patch.object(Pipeline, "_sum_shared_gradients", repeated)


def number_tokens_from_zero_in_later_stages() -> Any:
    context = GPTModel._context

    def from_zero(self: GPTModel, tokens: Any, position_ids: Any, documents: Any, given: Any, record: Any) -> Any:
        if not self.stage.has_embedding and self.options.pg_collection.size("cp") > 1:
            given = replace(given, tokens=given.tokens - given.tokens.min())
        return context(self, tokens, position_ids, documents, given, record)

    return patch.object(GPTModel, "_context", from_zero)


def place(groups: ProcessGroupCollection, axis: str) -> tuple[int, int]:
    """This rank's index on an axis, and the size of the axis. The shards of a mesh include cp, which varies fastest."""
    if axis in ("cp", "pp"):
        return groups.rank(axis), groups.size(axis)
    assert groups.mesh is not None
    along, cp = groups.mesh[f"dp_{axis}"], groups.size("cp") if axis == "shard" else 1
    return along.get_local_rank() // cp, along.size() // cp


def let_the_first_speak_for_all(axis: str, beside: str) -> Any:
    speaks = ProcessGroupCollection.speaks_for_tokens.fget

    def first_speaks(self: ProcessGroupCollection) -> bool:
        rank, size = place(self, axis)
        return speaks(self) and (rank == 0 or size == 1 or place(self, beside)[1] == 1)

    return patch.object(ProcessGroupCollection, "speaks_for_tokens", property(first_speaks))


# two axes: a fault that needs both
PAIR_FAULTS: dict[tuple[str, str], Fault] = {
    ("tensor", "context"): forget_which_heads_a_rank_has_where_rows_are_split,
    ("tensor", "pipeline"): sum_tied_embeddings_once_for_each_rank_of_tp,
    ("tensor", "replicate"): reduce_over_all_ranks_for_those_of_tp,
    ("tensor", "shard"): reduce_over_all_ranks_for_those_of_tp,
    ("context", "pipeline"): number_tokens_from_zero_in_later_stages,
    ("context", "replicate"): partial(let_the_first_speak_for_all, "cp", "replicate"),
    ("context", "shard"): partial(let_the_first_speak_for_all, "cp", "shard"),
    ("pipeline", "replicate"): partial(let_the_first_speak_for_all, "replicate", "pp"),
    ("pipeline", "shard"): partial(let_the_first_speak_for_all, "shard", "pp"),
    ("replicate", "shard"): partial(let_the_first_speak_for_all, "replicate", "shard"),
}
