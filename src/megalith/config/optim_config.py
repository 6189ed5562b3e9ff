"""The optimizer, and how its rates change over the run."""

from typing import Annotated, Literal

from pydantic import Field

from megalith.config.settings_group import Follows, SettingsGroup

__all__ = ["OptimConfig", "ParamGroupOverride"]

_Decay = Annotated[float, Field(ge=0, lt=1)]


class ParamGroupOverride(SettingsGroup):
    """Other rates for the parameters whose names match a pattern; what is left out is as for all."""

    match: str = Field(min_length=1, description="pattern over parameter names, as of fnmatch", examples=["*embed*"])
    max_lr: float | None = Field(default=None, ge=0, description="[learning rate] at the peak")
    min_lr: float | None = Field(default=None, ge=0, description="[learning rate] at the end")
    wd_mult: float | None = Field(default=None, ge=0, description="[factor] on the weight decay")


class OptimConfig(SettingsGroup):
    """The optimizer. Schedules are those of ``optim.optimizer_param_scheduler``, counted in steps."""

    name: Literal["adamw"] = Field(default="adamw", description="the optimizer")
    lr: float = Field(gt=0, description="[learning rate] at the peak", examples=[3e-4])
    min_lr: float = Field(default=0.0, ge=0, description="[learning rate] at the end of the schedule and after it")
    weight_decay: float = Field(
        default=0.1, ge=0, description="[1/learning rate] decoupled; of matrices, not norms and biases"
    )
    end_weight_decay: float = Field(
        default_factory=Follows(lambda optim: optim["weight_decay"]),
        ge=0,
        description="[1/learning rate] weight decay at the end of its schedule",
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how weight decay goes from weight_decay to end_weight_decay, over all steps"
    )
    clip_norm: float = Field(
        default=1.0, ge=0, description="[gradient norm] above which gradients are scaled down; 0: off"
    )
    betas: tuple[_Decay, _Decay] = Field(
        default=(0.9, 0.95), strict=False, description="[factor] decay of the two moments"
    )
    eps: float = Field(default=1e-8, gt=0, description="[gradient] added to the root of the second moment")
    schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        default="cosine", description="the learning rate after warm-up; WSD is warm-up, stable, decay"
    )
    warmup_steps: int = Field(default=0, ge=0, description="[steps] of linear warm-up from 0")
    decay_steps: int | None = Field(
        default=None, ge=1, description="[steps] until min_lr is reached; null: train.steps"
    )
    wsd_decay_steps: int | None = Field(
        default=None, ge=1, description="[steps] of WSD's decay, the last of decay_steps"
    )
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="exponential", description="the shape of WSD's decay"
    )
    overrides: tuple[ParamGroupOverride, ...] = Field(
        default=(), strict=False, description="other rates for some parameters"
    )
