"""How a mixture of experts chooses the experts of a token, and what keeps their loads even."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["RouterConfig", "groups_limit_choices"]


def groups_limit_choices(top_k: int, num_groups: int, group_topk: int, group_score_topk: int | None = None) -> bool:
    """Whether some token may have another choice with these groups than without them.

    Not where all groups are taken; nor where groups are ranked by their best expert alone and top_k of them or more are
    taken: the top_k best experts are in the top_k best groups.
    """
    scored = top_k // group_topk if group_score_topk is None else group_score_topk
    return group_topk < num_groups and (scored > 1 or group_topk < top_k)


class RouterConfig(SettingsGroup):
    """The router of every layer with experts. Its scores are computed in float32 whatever precision.dtype is."""

    dotted_name: ClassVar[str] = "model.moe.router"

    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field(
        default="softmax",
        description="of the logits; sigmoid and sqrtsoftplus are divided by their sum over the chosen experts "
        "(DeepSeek-V3)",
    )
    pre_softmax: bool = Field(
        default=False,
        description="softmax over all experts and no division after the choice, instead of softmax over the chosen",
    )
    num_groups: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[groups] of experts, one after the other, of which a token may choose from group_topk "
        "(device- or node-limited routing)",
    )
    group_topk: int | None = Field(
        default=None, ge=1, le=LARGEST_SIZE, description="[groups] that a token may choose from"
    )
    group_score_topk: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[experts] of a group whose best scores are summed up to choose groups; null: top_k / group_topk "
        "(DeepSeek-V3); DeepSeek-V2 has 1",
    )
    scaling_factor: float = Field(default=1.0, gt=0, description="[factor] on the weights of the chosen experts")
    bias: bool = Field(default=False, description="the logits have a bias (gpt-oss)")
    selection: Literal["top_k", "sinkhorn", "quantile", "round_robin"] = Field(
        default="top_k",
        description="how experts are chosen: by their scores; in training by scores that Sinkhorn's iteration has "
        "balanced; by logits less offsets that follow their quantiles; or in turn, for benchmarks",
    )
    expert_bias_update_rate: float | None = Field(
        default=None,
        ge=0,
        description="[score] by which a bias for the choice alone rises or falls for each expert after a step, toward "
        "even loads (arXiv:2408.15664); 0: it stays; null: there is none",
        examples=[1e-3],
    )
    quantile_decay: float = Field(
        default=0.0, ge=0, lt=1, description="[share] of the old offsets that an update of selection=quantile keeps"
    )
    jitter: float = Field(
        default=0.0, ge=0, lt=1, description="[ratio] by which features that a router sees vary at most in training"
    )
    sequence_balance: float = Field(
        default=0.0,
        ge=0,
        description="[ratio] weight of the switch loss (arXiv:2101.03961) over each sequence, the mean of all",
        examples=[1e-2],
    )
    micro_batch_balance: float = Field(
        default=0.0, ge=0, description="[ratio] weight of the switch loss over a micro-batch of a data-parallel rank"
    )
    global_balance: float = Field(
        default=0.0,
        ge=0,
        description="[ratio] weight of the switch loss over the micro-batches of all ranks, by the loads of the step "
        "so far",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="[ratio] weight of the squared logsumexp of a token's logits (arXiv:2202.08906)",
        examples=[1e-3],
    )
