"""Seeded faults of mixtures of experts over several ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megalith.parallel import parameters
from megalith.training import step
from megalith.transformer.moe import balance, experts, router, token_dispatcher
from megalith.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megalith.transformer.step_record import StepRecord

__all__ = ["MOE_FAULTS", "Fault"]

Fault = Callable[[], Any]
Layout = dict[str, Any]

EXPERT: Layout = {"expert": 2}
EXPERT_TENSOR: Layout = {"expert_tensor": 2}
TENSOR: Layout = {"tensor": 2, "sequence": True, "expert_tensor": 1}
CONTEXT: Layout = {"context": 2}
SHARD: Layout = {"shard": 2}
SIGMOID = {"score_function": "sigmoid"}


def send_tokens_to_the_next_expert() -> Any:
    send = MoEAlltoAllTokenDispatcher.send

    def shifted(self: Any, tokens: Any, routing: Any, capacity: int | None = None) -> Any:
        kept = routing.indices < self.num_experts
        indices = torch.where(kept, (routing.indices + self.ep_rank) % self.num_experts, routing.indices)
        return send(self, tokens, replace(routing, indices=indices), capacity)

    return patch.object(MoEAlltoAllTokenDispatcher, "send", shifted)


def scale_balance_gradients_by_the_ranks_of_context() -> Any:
    def scaled(x: Any, loss: Any, scale: float) -> Any:
        return balance._WithGradientOf.apply(x, loss, 2.0 * scale)

    return patch.object(balance, "with_gradient_of", scaled)


def average_balance_losses_over_this_ranks_micro_batches_alone() -> Any:
    return patch.object(step, "StepRecord", lambda scale: StepRecord(2.0 * scale))


def count_the_choices_of_this_rank_alone() -> Any:
    return patch.object(router, "_summed", lambda counts, groups: counts.clone())


def move_biases_once_for_each_micro_batch() -> Any:
    update = router.TopKRouter.update_balance_

    def twice(self: Any, loads: Any, offsets: Any) -> None:
        for _ in range(2):
            update(self, loads, offsets)

    return patch.object(router.TopKRouter, "update_balance_", twice)


def forget_the_gradient_of_the_first_expert() -> Any:
    product = experts.grouped_matmul

    def forgetful(x: Any, weight: Any, rows: Any, **options: Any) -> Any:
        kept = torch.cat([weight[:1].detach(), weight[1:]])
        return product(x, kept, rows, **options)

    return patch.object(experts, "grouped_matmul", forgetful)


def apply_weights_in_the_order_in_which_rows_were_sent() -> Any:
    permute_by = token_dispatcher.permute_by

    def unsorted(x: Any, found: Any, weights: Any) -> Any:
        rows, sorted_weights = permute_by(x, found, weights)
        received = weights.shape[1] == 1
        return rows, weights.flatten() if received else sorted_weights

    return patch.object(token_dispatcher, "permute_by", unsorted)


def keep_the_terms_of_expert_tensor_apart() -> Any:
    def own(self: Any, y: Any, gathered: list[int]) -> Any:
        first = sum(gathered[: self.etp_rank])
        return y[first : first + gathered[self.etp_rank]] if self.etp_group is not None else y

    return patch.object(MoEAlltoAllTokenDispatcher, "_sum_over_etp", own)


def count_a_slot_twice() -> Any:
    count = balance.choices_of_sequences

    def twice(indices: Any, *arguments: Any) -> Any:
        found = count(indices, *arguments)
        found[0, indices[0, 0] % (found.shape[1] - 1)] += 1
        return found

    return patch.object(balance, "choices_of_sequences", twice)


def send_weights_without_their_gradients() -> Any:
    begin = token_dispatcher.begin_all_to_all

    def begin_detached(x: torch.Tensor, *arguments: Any) -> Any:
        return begin(x.detach() + 0.0 * x if x.ndim == 1 else x, *arguments)

    return patch.object(token_dispatcher, "begin_all_to_all", begin_detached)


def take_a_routers_part_of_a_gradient_for_the_whole() -> Any:
    return patch.object(router, "local", lambda weight, partial=False: parameters.local(weight))


SEQUENCE = {"router": {"sequence_balance": 0.3}}
# fault: a layout and model.moe options that expose it
MOE_FAULTS: list[tuple[Fault, Layout, dict[str, Any]]] = [
    (send_tokens_to_the_next_expert, EXPERT, {}),
    (forget_the_gradient_of_the_first_expert, EXPERT, {}),
    (send_weights_without_their_gradients, EXPERT, {}),
    (apply_weights_in_the_order_in_which_rows_were_sent, EXPERT, {}),
    (keep_the_terms_of_expert_tensor_apart, EXPERT_TENSOR, {}),
    (take_a_routers_part_of_a_gradient_for_the_whole, TENSOR, {}),
    (scale_balance_gradients_by_the_ranks_of_context, CONTEXT, SEQUENCE),
    (count_the_choices_of_this_rank_alone, TENSOR, SEQUENCE),
    (count_the_choices_of_this_rank_alone, SHARD, {"router": {"global_balance": 0.3}}),
    (count_a_slot_twice, SHARD, SEQUENCE),
    (average_balance_losses_over_this_ranks_micro_batches_alone, SHARD, SEQUENCE),
    (move_biases_once_for_each_micro_batch, SHARD, {"router": {**SIGMOID, "expert_bias_update_rate": 0.05}}),
]
