"""The router of a mixture of experts: chooses experts and weights for each token, and balances the experts' loads.

Logits are x W^T (+ b), in float32 or wider. ``routing`` defines how they choose experts, ``balance`` the losses, and
``capacity`` which choices are dropped. Losses, counts and jitter apply in training only.

Each rank of tp (under sequence parallelism) and of cp routes its own tokens. Together these ranks share a micro-batch:
its losses are computed over all of them, and Sinkhorn's iteration and quantiles use the logits of all.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalith.config import TransformerConfig
from megalith.errors import ShapeError
from megalith.numerics.dropout import uniform
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.topology.collectives import gather_from_sequence_parallel_region
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe import balance
from megalith.transformer.moe.capacity import capacity_of_real_tokens, drop_past_capacity, expert_capacity
from megalith.transformer.moe.routing import (
    Routing,
    choose_by_score,
    choose_in_turn,
    largest_of_rows,
    of_real_tokens,
    router_logits,
    sinkhorn,
    weights_of,
)
from megalith.transformer.step_record import MicroBatchRecord, StepRecord

__all__ = ["TopKRouter"]


class TopKRouter(DeclaringModule):
    """The router of one layer; ``layer`` is its global index, under which it writes to the step's record."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: Tensor | None
    quantile_offsets: Tensor | None

    def __init__(self, config: TransformerConfig, options: BuildOptions, layer: int) -> None:
        super().__init__()
        assert config.moe is not None, "only built for models with model.moe"
        self.num_experts, self.top_k = config.moe.num_experts, config.moe.top_k
        self.router, self.capacity = config.moe.router, config.moe.capacity
        self.layer = layer
        groups, self.partial = options.pg_collection, options.sequence_parallel
        self.token_groups = [group for group in (groups.tp if self.partial else None, groups.cp) if group is not None]
        self.dp_group = groups.dp
        # named and keyed like a dropout site; what it draws is a factor on each feature
        self.jitter = DropoutSite(self.router.jitter)

        E, H = self.num_experts, config.hidden_size
        self.declare("weight", ParameterSpec((E, H), "normal", config.init_method_std), groups, options.dtype)
        self.register_parameter("bias", None)
        self.register_buffer("e_score_correction_bias", None)
        self.register_buffer("quantile_offsets", None)
        if self.router.bias:
            self.declare("bias", ParameterSpec((E,), "zeros"), groups, options.dtype)
        if self.router.expert_bias_update_rate is not None:
            self.declare_buffer("e_score_correction_bias", lambda: torch.zeros(E, dtype=torch.float32), saved=True)
        if self.router.selection == "quantile":
            self.declare_buffer("quantile_offsets", lambda: torch.zeros(E, dtype=torch.float32), saved=True)

    def forward(
        self, x: Tensor, context: LayerContext, padding_mask: Tensor | None = None, replayed: Tensor | None = None
    ) -> Routing:
        """Routes the tokens of this rank.

        Args:
            x: [S, B, H] with this rank's S/cp/tp tokens per row; token s B + b of the T is x[s, b].
            context: of the micro-batch, with its record and the global ids of its tokens.
            padding_mask: bool [S, B], True for real tokens. Padding is routed too unless there is a capacity, of which
                it has no share, but is not counted in loads or losses.
            replayed: int64 [T, K], the ``indices`` of an earlier routing to use instead of choosing experts. Weights
                are computed from ``x`` and have gradients. The host synchronizes with the device to check the indices.

        Raises:
            ShapeError: ``padding_mask`` or ``replayed`` has another shape or dtype, or ``replayed`` has an index that
                is not an expert's, such as -1, or the same expert twice for a token. A dropped choice of e is E + e.
        """
        S, B, H = x.shape
        _check("padding_mask", padding_mask, torch.bool, (S, B))
        _check("replayed", replayed, torch.int64, (S * B, self.top_k))
        _check_experts(replayed, self.num_experts)
        logits = self._logits(x.reshape(S * B, H), context)  # [T, E]
        real = logits.new_ones(S * B, dtype=torch.bool) if padding_mask is None else padding_mask.reshape(S * B)
        # a user's own training loop may have no record: use a temporary one with a single micro-batch
        record = context.record or StepRecord(1.0).micro_batch(0)
        if replayed is None:
            indices, weights = self._choose(logits, context, record, real)
        else:
            indices, weights = replayed, weights_of(logits, replayed, self.router)
        choices = balance.choices_of_sequences(indices, self.num_experts, B, real)  # [B, E + 1]
        tokens_per_expert = choices[:, :-1].sum(dim=0)
        if self.training:
            record.add(self.layer, tokens_per_expert)
            weights = self._with_losses(weights, logits, choices, record, real)
        routing = Routing(indices, weights, tokens_per_expert)
        if self.capacity is None or (replayed is not None and not self.capacity.pad):
            return routing  # a replayed routing marks what was dropped, but padded rows must not exceed the capacity
        sizes = self.top_k, self.num_experts, self.capacity.factor
        C = expert_capacity(S * B, *sizes) if padding_mask is None else capacity_of_real_tokens(real, *sizes)
        return drop_past_capacity(routing, C, self.capacity.drop, real)

    def update_balance_(self, tokens_per_expert: Tensor, offset_estimates: Tensor | None) -> None:
        """Updates the expert bias and the quantile offsets: once per applied step, identically on all ranks.

        Args:
            tokens_per_expert: int64 [E], ``StepRecord.tokens_per_expert`` summed over the ranks of the layer's stage.
            offset_estimates: [E + 1], ``StepRecord.total("quantile_offsets", layer)`` summed in the same way; for
                quantile selection only.
        """
        if self.e_score_correction_bias is not None and self.router.expert_bias_update_rate is not None:
            rate = self.router.expert_bias_update_rate
            balance.update_expert_bias_(self.e_score_correction_bias, tokens_per_expert, rate)
        if self.quantile_offsets is not None and offset_estimates is not None:
            balance.update_quantile_offsets_(self.quantile_offsets, offset_estimates, self.router.quantile_decay)

    def _logits(self, x: Tensor, context: LayerContext) -> Tensor:
        """[T, H] -> [T, E], float32 or wider."""
        if (jitter := self.jitter.of(context.hidden_dropout_key)) is not None:
            assert jitter.key is not None, "an active dropout site has a key"
            # not traced: Inductor shifts Philox's integers as floats, which does not compile in its C++ (torch 2.13)
            noise = torch.compiler.disable(uniform)(jitter.key, x.shape[1]).view(x.shape)
            x = x * (1.0 + jitter.p * (2.0 * noise - 1.0))
        bias = None if self.bias is None else local(self.bias, partial=self.partial)
        return router_logits(x, local(self.weight, partial=self.partial), bias)

    def _choose(
        self, logits: Tensor, context: LayerContext, record: MicroBatchRecord, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the chosen experts [T, K] and their weights for ``logits`` [T, E], before any token is dropped."""
        match self.router.selection:
            case "top_k":
                return choose_by_score(logits, self.top_k, self.router, self.e_score_correction_bias)
            case "round_robin":
                key = context.hidden_dropout_key
                ids = torch.arange(len(logits), device=logits.device) if key is None else key.tokens.reshape(-1)
                indices = choose_in_turn(ids, self.top_k, self.num_experts)
            case "quantile":
                assert self.quantile_offsets is not None, "declared in the constructor"
                offsets = self.quantile_offsets.to(logits.dtype)
                indices = largest_of_rows(logits - offsets, self.top_k)
                if self.training:
                    record.kept("quantile_offsets", self.layer, lambda: self._quantile_offsets(logits, offsets, real))
            case "sinkhorn":
                indices = largest_of_rows(logits, self.top_k)
                if self.training:
                    # kept, because it needs collectives; padding tokens have no balanced logits
                    balanced = record.kept("sinkhorn", self.layer, lambda: self._sinkhorn(logits, real))
                    indices = of_real_tokens(balanced, real, indices)
        return indices, weights_of(logits, indices, self.router)

    def _sinkhorn(self, logits: Tensor, real: Tensor) -> Tensor:
        """Returns the experts [T, K] of this rank's tokens, balanced over the micro-batch."""
        every, whose, start = self._of_micro_batch(logits, real)
        return largest_of_rows(sinkhorn(every, whose)[start : start + len(logits)], self.top_k)

    def _quantile_offsets(self, logits: Tensor, offsets: Tensor, real: Tensor) -> Tensor:
        every, whose, _ = self._of_micro_batch(logits, real)
        return balance.quantile_offsets(every, offsets, self.top_k, whose)

    def _of_micro_batch(self, logits: Tensor, real: Tensor) -> tuple[Tensor, Tensor, int]:
        """Returns the logits of all ranks that share the micro-batch, which are real, and where this rank's begin."""
        rows, start = torch.cat([logits.detach(), real[:, None].to(logits.dtype)], dim=1), 0  # [T, E + 1]
        for group in self.token_groups:
            start += group.rank() * len(rows)
            rows = gather_from_sequence_parallel_region(rows, group)
        return rows[:, :-1], rows[:, -1] > 0, start

    def _with_losses(
        self, weights: Tensor, logits: Tensor, choices: Tensor, record: MicroBatchRecord, real: Tensor
    ) -> Tensor:
        """Returns ``weights`` with the gradient of the balance losses attached; ``choices`` [B, E + 1] are local."""
        router, K = self.router, self.top_k
        of_score = {
            "sequence_balance": router.sequence_balance,
            "micro_batch_balance": router.micro_batch_balance,
            "global_balance": router.global_balance,
        }
        ratios = {name: ratio for name, ratio in {**of_score, "z_loss": router.z_loss}.items() if ratio}
        if not ratios:
            return weights
        choices = record.kept("choices", self.layer, lambda: _summed(choices, self.token_groups))
        all_choices, num_tokens = choices.sum(dim=0), choices[:, -1].sum()
        losses: dict[str, Tensor] = {}
        if ratios.keys() & of_score.keys():
            scores = balance.scores_of_sequences(logits, K, router.score_function, len(choices), real)  # [B, E]
            all_scores = scores.sum(dim=0)
            losses["sequence_balance"] = balance.switch_loss(scores, choices[:, -1], choices, K).mean()
            losses["micro_batch_balance"] = balance.switch_loss(all_scores, num_tokens, all_choices, K)
        if "global_balance" in ratios:
            so_far = self._choices_so_far(all_choices, record)
            losses["global_balance"] = balance.switch_loss(all_scores, num_tokens, so_far, K)
        if "z_loss" in ratios:
            losses["z_loss"] = balance.z_loss(logits, real, num_tokens)
        for name in ratios:
            record.add_loss(name, self.layer, losses[name])
        total = sum((ratio * losses[name] for name, ratio in ratios.items()), start=logits.new_zeros(()))
        return balance.with_gradient_of(weights, total, record.balance_scale)

    def _choices_so_far(self, choices: Tensor, record: MicroBatchRecord) -> Tensor:
        """Sums ``choices`` over dp and over the step's micro-batches up to and including this one -> [E + 1]."""
        dp_groups = [] if self.dp_group is None else [self.dp_group]
        record.kept("choices_of_all_ranks", self.layer, lambda: _summed(choices, dp_groups))

        def until_now() -> Tensor:
            total = record.step.total("choices_of_all_ranks", self.layer)
            assert total is not None, "includes those of this micro-batch"
            return total

        return record.kept("choices_so_far", self.layer, until_now)


def _check(name: str, given: Tensor | None, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if given is not None and (given.dtype != dtype or given.shape != shape):
        raise ShapeError(f"{name} must be {dtype} {list(shape)}; got {given.dtype} {list(given.shape)}")


def _check_experts(replayed: Tensor | None, num_experts: int) -> None:
    """Checks that indices are experts or dropped choices; a negative index modulo E would pass for an expert."""
    if replayed is None or not replayed.numel():
        return
    least, greatest = torch.stack(replayed.aminmax()).tolist()
    if least < 0 or greatest >= 2 * num_experts:
        raise ShapeError(
            f"replayed must hold expert indices from 0 to {num_experts - 1}, or {num_experts} + e for a dropped choice "
            f"of expert e; got {least if least < 0 else greatest}; if a token chose fewer than top_k experts, "
            "fill up with dropped choices"
        )
    experts = (replayed % num_experts).sort(dim=1).values
    if (twice := (experts[:, 1:] == experts[:, :-1]).any(dim=1)).any():
        token = int(twice.nonzero()[0])
        raise ShapeError(
            f"replayed must hold distinct experts for each token; got {replayed[token].tolist()} for token {token}, "
            f"where index {num_experts} + e is a dropped choice of expert e"
        )


def _summed(counts: Tensor, groups: list[ProcessGroup]) -> Tensor:
    """Returns integer ``counts`` summed over the ranks of all ``groups``."""
    total = counts.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
