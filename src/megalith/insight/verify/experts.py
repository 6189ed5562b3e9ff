"""Reduces a mixture of experts, and determines how batches must be split so that one process has the same numbers.

A switch loss over a micro-batch, Sinkhorn or quantile selection, and the tokens that a capacity drops depend on which
samples are in a micro-batch. A global switch loss depends on the concurrent micro-batches of all data-parallel ranks,
which together correspond to one micro-batch of one process.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from megalith.config import MoEConfig, RunConfig
from megalith.insight.verify.cover import Degrees

__all__ = ["comparable_at", "experts_not_shown", "small_experts"]

_ROUTER = "model.moe.router"


def comparable_at(moe: MoEConfig | None) -> Literal["any", "equal micro-batches", "equal numbers of them"]:
    """Which splits of a batch produce the same numbers as one process.

    "any"; "equal micro-batches": only splits into the same micro-batches; "equal numbers of them": each data-parallel
    rank must have as many micro-batches as one process.
    """
    if moe is None:
        return "any"
    if _of_micro_batches(moe):
        return "equal micro-batches"
    return "equal numbers of them" if moe.router.global_balance else "any"


def small_experts(moe: MoEConfig, hidden_size: int, rows: Sequence[Degrees]) -> dict[str, Any]:
    """The settings of ``model.moe``, except ``layers``, for a model of ``hidden_size`` that ``rows`` can split."""
    router, groups, kept = moe.router, moe.router.num_groups, moe.router.group_topk
    if groups is None or kept is None:
        num_experts = 4 if moe.num_experts > 2 else moe.num_experts
        top_k = num_experts if moe.top_k == moe.num_experts else min(moe.top_k, 2)
    else:
        num_experts = 16
        several = moe.top_k > kept
        groups, kept = (2, 1) if kept == 1 else (4, 2)  # config rejects keeping all groups
        top_k = 2 * kept if several else min(moe.top_k, kept)
    changes: dict[str, Any] = {
        "model.moe.num_experts": num_experts,
        "model.moe.top_k": top_k,
        "model.moe.ffn_hidden_size": moe.ffn_hidden_size and hidden_size,
        "model.moe.shared_ffn_hidden_size": moe.shared_ffn_hidden_size and hidden_size,
        "model.moe.latent_size": moe.latent_size and hidden_size // 2,
        f"{_ROUTER}.num_groups": groups,
        f"{_ROUTER}.group_topk": kept,
        f"{_ROUTER}.group_score_topk": router.group_score_topk and min(router.group_score_topk, 2),
    }
    if _of_micro_batches(moe):
        changes[f"{_ROUTER}.global_balance"] = None
    if moe.capacity is not None:
        # slightly below the factor that config rejects because it never drops; rounded up, it has room for all tokens
        nothing_dropped = 0.999 * num_experts / top_k
        split = _tokens_are_split(rows)
        changes["model.moe.capacity.factor"] = nothing_dropped if split else min(moe.capacity.factor, 1.0)
    return changes


def experts_not_shown(config: RunConfig, rows: Sequence[Degrees]) -> Iterator[str]:
    """Lines about what a comparison of the layouts ``rows`` with one process cannot show."""
    if (moe := config.model.moe) is None:
        return
    beside = _of_micro_batches(moe)
    if moe.router.global_balance and beside:
        yield (
            f"{_ROUTER}.global_balance with {beside[0]}: a single process can reproduce the micro-batches of each rank "
            "or those of all ranks together, but not both; global_balance was disabled"
        )
    if moe.capacity is not None and _tokens_are_split(rows):
        yield (
            "model.moe.capacity.factor: each tensor and context rank drops tokens among its own, which one process "
            "cannot reproduce; it was increased until no tokens are dropped"
        )
    needs = {"flex": "DeepEP", "symmetric": "symmetric memory"}
    if (method := config.parallel.dispatch.method) in needs:
        yield f"parallel.dispatch.method={method}: {needs[method]} needs several GPUs; all_to_all was used instead"


def _of_micro_batches(moe: MoEConfig) -> list[str]:
    """Settings whose effect depends on the samples in a micro-batch."""
    found = []
    if moe.router.micro_batch_balance:
        found.append(f"{_ROUTER}.micro_batch_balance")
    if moe.router.selection in ("sinkhorn", "quantile"):
        found.append(f"{_ROUTER}.selection={moe.router.selection}")
    if moe.capacity is not None:
        found.append("model.moe.capacity")
    return found


def _tokens_are_split(rows: Sequence[Degrees]) -> bool:
    return any("tensor" in row or "context" in row for row in rows)
