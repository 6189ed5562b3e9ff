"""Seeded faults of context parallelism, each with the layout that it breaks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalith.numerics.dropout import attention_keep_mask
from megalith.parallel.context import attention, partial_attention
from megalith.parallel.context.partial_attention import HeadDropout, PartialAttention
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training import setup
from megalith.training.tasks import pretrain_gpt
from megalith.training.tasks.pretrain_gpt import PretrainGPT

__all__ = ["CONTEXT_FAULTS", "GATHERED", "RING", "TRADED"]


def take_the_last_part_of_the_keys_for_all() -> Any:
    def last(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
        return other, other_lse

    return patch.object(partial_attention, "merge_attention", last)


def average_the_parts_without_their_weights() -> Any:
    merge = partial_attention.merge_attention

    def mean(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
        _, merged = merge(out, lse, other, other_lse)
        seen = torch.isfinite(lse).permute(2, 0, 1).unsqueeze(-1)
        return torch.where(seen, (out + other) / 2, other), merged

    return patch.object(partial_attention, "merge_attention", mean)


def consecutive(seq_length: int, size: int, rank: int) -> Tensor:
    n = seq_length // size
    return torch.arange(rank * n, (rank + 1) * n)


def cut_the_batch_into_consecutive_parts() -> Any:
    return patch.object(pretrain_gpt, "zigzag_positions", consecutive)


def give_a_rank_its_neighbours_late_chunk() -> Any:
    def spans(seq_length: int, size: int, rank: int) -> list[range]:
        n = seq_length // (2 * size)
        late = size + rank
        return [range(rank * n, (rank + 1) * n), range(late * n, (late + 1) * n)]

    return patch.object(attention, "zigzag_spans", spans)


def with_inputs(change: Callable[[Any], dict[str, Any]]) -> Any:
    make = PretrainGPT.inputs

    def changed(self: PretrainGPT, batch: Any, step: int, device: torch.device) -> Any:
        inputs = make(self, batch, step, device)
        return replace(inputs, **change(inputs))

    return patch.object(PretrainGPT, "inputs", changed)


def number_positions_on_each_rank_from_zero() -> Any:
    return with_inputs(lambda inputs: {"position_ids": torch.arange(inputs.tokens.shape[1])})


def number_tokens_for_dropout_on_each_rank_from_zero() -> Any:
    def ids(inputs: Any) -> dict[str, Any]:
        tokens = inputs.dropout_key.tokens
        return {"dropout_key": replace(inputs.dropout_key, tokens=tokens - tokens.min())}

    return with_inputs(ids)


def drop_keys_by_their_place_in_a_part() -> Any:
    def mask(key: Any, p: float, num_heads: int, num_keys: int, head_offset: int, key_offset: int) -> Tensor:
        return attention_keep_mask(key, p, num_heads, num_keys, head_offset)

    return patch.object(partial_attention, "attention_keep_mask", mask)


def drop_by_heads_before_the_trade() -> Any:
    trade = attention._HeadTrade.dropout

    def dropout(self: Any, drops: HeadDropout, num_heads: int) -> HeadDropout:
        return replace(trade(self, drops, num_heads), head_offset=drops.head_offset)

    return patch.object(attention._HeadTrade, "dropout", dropout)


def forget_the_gradients_of_remote_keys() -> Any:
    add = PartialAttention.add_gradients_

    def of_own(self: PartialAttention, gradients: Any, dout: Any, q: Any, kv: Any, merged: Any, spans: Any) -> None:
        dq, dk, dv = gradients
        if spans != self.spans:
            dk, dv = torch.zeros_like(dk), torch.zeros_like(dv)
        add(self, (dq, dk, dv), dout, q, kv, merged, spans)

    return patch.object(PartialAttention, "add_gradients_", of_own)


def take_keys_in_the_order_of_ranks() -> Any:
    return patch.object(attention, "zigzag_join", lambda parts, size: parts)


def give_gathered_keys_the_gradient_of_one_rank() -> Any:
    gather = attention.gather_from_sequence_parallel_region
    return patch.object(attention, "gather_from_sequence_parallel_region", lambda x, group: gather(x, group, False))


def attend_to_own_keys_only() -> Any:
    add = PartialAttention.add_

    def of_own(self: PartialAttention, out: Any, lse: Any, q: Any, k: Any, v: Any, spans: Any) -> None:
        if spans == self.spans:
            add(self, out, lse, q, k, v, spans)

    return patch.object(PartialAttention, "add_", of_own)


def let_one_rank_of_cp_speak_for_all() -> Any:
    return patch.object(ProcessGroupCollection, "speaks_for_tokens", property(lambda self: self.rank("cp") == 0))


def count_the_tokens_of_all_ranks_on_each() -> Any:
    part = PretrainGPT.context_part
    counts = PretrainGPT.counts

    def keeping(self: PretrainGPT, batch: Any, rank: int, size: int) -> Any:
        self.whole = counts(self, batch)
        return part(self, batch, rank, size)

    return patch.multiple(PretrainGPT, context_part=keeping, counts=lambda self, batch: self.whole)


def read_other_rows_on_every_rank_of_cp() -> Any:
    loader = setup.StepLoader
    return patch.object(
        setup,
        "StepLoader",
        lambda dataset, collate, rank, size: loader(dataset, collate, torch.distributed.get_rank(), 2),
    )


RING = {"context": 2}
GATHERED = {"context": 2, "context_method": "all_gather"}
TRADED = {"context": 2, "context_method": "all_to_all"}
CONTEXT_FAULTS: dict[Callable[[], Any], dict[str, Any]] = {
    take_the_last_part_of_the_keys_for_all: RING,
    average_the_parts_without_their_weights: RING,
    cut_the_batch_into_consecutive_parts: RING,
    give_a_rank_its_neighbours_late_chunk: RING,
    number_positions_on_each_rank_from_zero: RING,
    number_tokens_for_dropout_on_each_rank_from_zero: RING,
    drop_keys_by_their_place_in_a_part: RING,
    forget_the_gradients_of_remote_keys: RING,
    attend_to_own_keys_only: RING,
    let_one_rank_of_cp_speak_for_all: RING,
    count_the_tokens_of_all_ranks_on_each: RING,
    read_other_rows_on_every_rank_of_cp: RING,
    take_keys_in_the_order_of_ranks: GATHERED,
    give_gathered_keys_the_gradient_of_one_rank: GATHERED,
    drop_by_heads_before_the_trade: TRADED,
}
