"""What a mixture of experts exchanges for a micro-batch, and its weights, in closed form.

    router      counts over the ranks that share a micro-batch, for its losses
    tokens      to experts and back, see ``parallel.expert.traffic``
    shared      an MLP, which enters and leaves tensor parallelism

A router's losses and choices are kept for recomputation, so their communication is not repeated.
"""

from dataclasses import dataclass

import torch

from megalith.config import DispatchConfig, MoEConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.errors import ConfigError
from megalith.parallel.expert.traffic import Dispatch, Rows, all_gather_traffic, all_to_all_traffic
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.regions import enter_traffic, leave_traffic
from megalith.parallel.traffic import Axis, Passes, Traffic, collective
from megalith.transformer.moe.capacity import expert_capacity

__all__ = ["MicroBatch", "dispatch_traffic", "expert_weights", "moe_traffic", "moe_weights"]

_INT64, _FLOAT64 = 8, 8


@dataclass(frozen=True)
class MicroBatch:
    """``num_sequences``, of which a rank holds ``num_tokens`` in total, after context and sequence parallelism."""

    num_sequences: int
    num_tokens: int
    dtype: torch.dtype


def moe_traffic(model: TransformerConfig, dispatch: DispatchConfig, layout: Layout, batch: MicroBatch) -> Passes:
    """Returns what the layer exchanges with even loads, where every rank receives as many rows as it sends.

    Raises:
        ConfigError: a dispatch that is not counted: DeepEP, symmetric memory, or one that takes several turns even with
            even loads.
    """
    moe = _experts_of(model)
    found = _router_traffic(moe, layout, batch)
    found += dispatch_traffic(model, dispatch, layout, batch, _even_rows(moe, layout, batch))
    if dispatch.max_rows is not None:
        numbers = (moe.num_experts + 1) * _INT64
        turns = collective("expert", "all_reduce", numbers, layout.expert)
        turns += collective("expert_tensor", "all_reduce", numbers, layout.expert_tensor)
        turns += collective("edp", "all_reduce", _FLOAT64, layout.edp_replicate * layout.edp_shard)
        found += Passes(turns)
    if moe.shared_ffn_hidden_size is not None:
        X = batch.num_tokens * layout.tensor * model.hidden_size * batch.dtype.itemsize
        found += enter_traffic(X, layout.tensor, True) + leave_traffic(X, layout.tensor, True)
    return found


def dispatch_traffic(
    model: TransformerConfig, dispatch: DispatchConfig, layout: Layout, batch: MicroBatch, rows: Rows
) -> Passes:
    """Returns what sending ``rows`` to experts and back exchanges."""
    moe = _experts_of(model)
    sizes = Dispatch(
        layout.expert,
        layout.expert_tensor,
        moe.num_experts,
        moe.top_k,
        (moe.latent_size or model.hidden_size) * batch.dtype.itemsize,
        _wide(batch.dtype).itemsize,
    )
    if dispatch.method in ("flex", "symmetric"):
        through = "DeepEP" if dispatch.method == "flex" else "torch's symmetric memory"
        raise ConfigError(f"traffic through {through} is not counted; use parallel.dispatch.method=all_to_all")
    if dispatch.method == "all_gather":
        return all_gather_traffic(sizes, batch.num_tokens)
    if dispatch.max_rows is not None and dispatch.max_rows < 1:
        raise ConfigError(
            f"with parallel.dispatch.max_rows={dispatch.max_rows:g}, balanced loads take several rounds, which are not "
            "counted; use 1 or more"
        )
    return all_to_all_traffic(sizes, rows, padded=moe.capacity is not None and moe.capacity.pad)


def moe_weights(model: TransformerConfig) -> list[Weight]:
    """The dense weights of the layer; partial ones see a rank's own tokens, so their gradients are summed over tp."""
    moe, H = _experts_of(model), model.hidden_size
    found = [Weight((moe.num_experts, H), partial=True)]
    if moe.router.bias:
        found.append(Weight((moe.num_experts,), partial=True))
    if moe.latent_size is not None:
        found += [Weight((moe.latent_size, H), partial=True), Weight((H, moe.latent_size), partial=True)]
    if (F := moe.shared_ffn_hidden_size) is not None:
        entering = 1 if model.gate_activation is None else 2
        found += [Weight((F, H), split=0)] * entering + [Weight((H, F), split=1)]
        if model.mlp_bias:
            found += [Weight((F,), split=0)] * entering + [Weight((H,), partial=True)]
        if moe.shared_expert_gate:
            found.append(Weight((1, H), partial=True))
    return found


def expert_weights(model: TransformerConfig) -> list[Weight]:
    """The weights of the experts, which are one FSDP2 unit; ``split`` is the dimension that etp splits."""
    moe, F = _experts_of(model), model.expert_ffn_hidden_size
    E, D, gated = moe.num_experts, moe.latent_size or model.hidden_size, model.gate_activation is not None
    inner = (2, F) if gated else (F,)
    found = [Weight((E, *inner, D), split=len(inner)), Weight((E, D, F), split=2)]
    if model.mlp_bias:
        found += [Weight((E, *inner), split=len(inner)), Weight((E, D), split=1)]
    return found


def _router_traffic(moe: MoEConfig, layout: Layout, batch: MicroBatch) -> Passes:
    """What the router exchanges over tensor (whose ranks have different tokens), context and data."""
    router, E = moe.router, moe.num_experts
    found = Traffic()
    if router.selection in ("sinkhorn", "quantile"):
        row, tokens = (E + 1) * _wide(batch.dtype).itemsize, batch.num_tokens
        for axis, size in _shares(layout):
            tokens *= size
            found += collective(axis, "all_gather", tokens * row, size)
    if router.sequence_balance or router.micro_batch_balance or router.global_balance or router.z_loss:
        for axis, size in _shares(layout):
            found += collective(axis, "all_reduce", batch.num_sequences * (E + 1) * _INT64, size)
    if router.global_balance:
        found += collective("data", "all_reduce", (E + 1) * _INT64, layout.data_parallel)
    return Passes(found)


def _shares(layout: Layout) -> tuple[tuple[Axis, int], ...]:
    """The axes whose ranks share a micro-batch, and their sizes."""
    return ("tensor", layout.tensor), ("context", layout.context)


def _even_rows(moe: MoEConfig, layout: Layout, batch: MicroBatch) -> Rows:
    chosen = batch.num_tokens * moe.top_k
    if moe.capacity is not None:
        places = moe.num_experts * expert_capacity(batch.num_tokens, moe.top_k, moe.num_experts, moe.capacity.factor)
        chosen = places if moe.capacity.pad else min(chosen, places)
    return Rows.even(chosen, layout.expert_tensor)


def _experts_of(model: TransformerConfig) -> MoEConfig:
    assert model.moe is not None, "only built for models with model.moe"
    return model.moe


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of logits and routing weights."""
    return torch.promote_types(dtype, torch.float32)
