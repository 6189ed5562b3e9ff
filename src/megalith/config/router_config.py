"""How a mixture of experts selects the experts of a token, and how their load is balanced."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["RouterConfig", "groups_limit_choices"]


def groups_limit_choices(top_k: int, num_groups: int, group_topk: int, group_score_topk: int | None = None) -> bool:
    """Whether these groups can change which experts are selected for some token.

    They cannot if all groups are taken, nor if groups are ranked by their best expert only and at least top_k of them
    are taken: the top_k best experts are in the top_k best groups.
    """
    scored = top_k // group_topk if group_score_topk is None else group_score_topk
    return group_topk < num_groups and (scored > 1 or group_topk < top_k)


class RouterConfig(SettingsGroup):
    """The router of every layer with experts. Its scores are computed in float32 regardless of precision.dtype."""

    dotted_name: ClassVar[str] = "model.moe.router"

    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field(
        default="softmax",
        description="score of an expert from its logit; sigmoid and sqrtsoftplus are normalized over the selected "
        "experts (DeepSeek-V3)",
    )
    pre_softmax: bool = Field(
        default=False,
        description="softmax over all experts without renormalization, instead of softmax over the selected experts",
    )
    num_groups: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[groups] of consecutive experts; a token may choose from group_topk of them "
        "(device- or node-limited routing)",
    )
    group_topk: int | None = Field(
        default=None, ge=1, le=LARGEST_SIZE, description="[groups] that a token may choose from"
    )
    group_score_topk: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[experts] per group whose best scores are summed to rank the groups; null: top_k / group_topk "
        "(DeepSeek-V3); DeepSeek-V2 uses 1",
    )
    scaling_factor: float = Field(default=1.0, gt=0, description="[factor] on the weights of the selected experts")
    bias: bool = Field(default=False, description="the logits have a bias (gpt-oss)")
    selection: Literal["top_k", "sinkhorn", "quantile", "round_robin"] = Field(
        default="top_k",
        description="how experts are selected: by score; in training, by scores balanced with Sinkhorn's iteration; by "
        "logits minus offsets that track their quantiles; or in turn, for benchmarks",
    )
    expert_bias_update_rate: float | None = Field(
        default=None,
        ge=0,
        description="[score] by which each expert's bias, used for selection only, is raised or lowered after a step "
        "to balance the load (arXiv:2408.15664); 0: constant bias; null: no bias",
        examples=[1e-3],
    )
    quantile_decay: float = Field(
        default=0.0, ge=0, lt=1, description="[share] of the old offsets that an update with selection=quantile keeps"
    )
    jitter: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="[ratio] largest random relative change of the router's input features in training",
    )
    sequence_balance: float = Field(
        default=0.0,
        ge=0,
        description="[ratio] weight of the Switch load-balancing loss (arXiv:2101.03961) of each sequence, averaged "
        "over sequences",
        examples=[1e-2],
    )
    micro_batch_balance: float = Field(
        default=0.0, ge=0, description="[ratio] weight of the Switch loss over a micro-batch of a data-parallel rank"
    )
    global_balance: float = Field(
        default=0.0,
        ge=0,
        description="[ratio] weight of the Switch loss over the micro-batches of all ranks, with the loads of the step "
        "so far",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="[ratio] weight of the z-loss, the squared logsumexp of a token's logits (arXiv:2202.08906)",
        examples=[1e-3],
    )
