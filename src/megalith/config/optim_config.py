"""The optimizer, and the schedules of its learning rate and weight decay."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import LARGEST_COUNT, SettingsGroup

__all__ = [
    "AdamWConfig",
    "OptimConfig",
    "ParamGroupOverride",
    "SGDConfig",
    "WSDConfig",
    "WeightDecayRampConfig",
]

_Decay = Annotated[float, Field(ge=0, lt=1)]


class ParamGroupOverride(SettingsGroup):
    """Different rates for the parameters whose names match a pattern; fields not given are as for all parameters."""

    match: str = Field(min_length=1, description="pattern over parameter names, as in fnmatch", examples=["*embed*"])
    max_lr: float | None = Field(default=None, ge=0, description="[learning rate] at the peak")
    min_lr: float | None = Field(default=None, ge=0, description="[learning rate] at the end")
    wd_mult: float | None = Field(default=None, ge=0, description="[factor] on the weight decay")


class AdamWConfig(SettingsGroup):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101), used with name=adamw."""

    dotted_name: ClassVar[str] = "optim.adamw"

    betas: tuple[_Decay, _Decay] = Field(
        default=(0.9, 0.95), strict=False, description="[factor] decay rates of the two moments"
    )
    eps: float = Field(default=1e-8, gt=0, description="[gradient] added to the square root of the second moment")


class SGDConfig(SettingsGroup):
    """Stochastic gradient descent as in torch.optim.SGD, used with name=sgd."""

    dotted_name: ClassVar[str] = "optim.sgd"

    momentum: float = Field(default=0.9, ge=0, lt=1, description="[factor] decay rate of the momentum; 0: no momentum")
    nesterov: bool = Field(default=False, description="use Nesterov momentum; needs momentum above 0")


class WSDConfig(SettingsGroup):
    """The decay that ends a WSD schedule (warm-up, stable, decay), used with schedule=WSD."""

    dotted_name: ClassVar[str] = "optim.wsd"

    decay_steps: int = Field(
        ge=1, le=LARGEST_COUNT, description="[steps] of the decay, which ends at optim.decay_steps", examples=[1000]
    )
    decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="exponential", description="shape of the decay"
    )


class WeightDecayRampConfig(SettingsGroup):
    """Weight decay that changes from weight_decay to another value over all steps; null: it is constant."""

    dotted_name: ClassVar[str] = "optim.weight_decay_ramp"

    schedule: Literal["linear", "cosine"] = Field(description="shape of the ramp", examples=["linear"])
    end: float = Field(ge=0, description="[1/learning rate] weight decay at the last step", examples=[0.2])


class OptimConfig(SettingsGroup):
    """The optimizer. Schedules are those of ``optim.optimizer_param_scheduler`` and count steps."""

    dotted_name: ClassVar[str] = "optim"

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="the optimizer")
    lr: float = Field(gt=0, description="[learning rate] at the peak", examples=[3e-4])
    min_lr: float = Field(default=0.0, ge=0, description="[learning rate] at the end of the schedule and after it")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="[1/learning rate] of matrices, not of norms and biases; decoupled with adamw, L2 with sgd",
    )
    weight_decay_ramp: WeightDecayRampConfig | None = Field(
        default=None, description="how weight decay changes over the run"
    )
    clip_norm: float = Field(
        default=1.0, ge=0, description="[gradient norm] above which gradients are scaled down; 0: off"
    )
    adamw: AdamWConfig | None = Field(default=None, description="settings of AdamW")
    sgd: SGDConfig | None = Field(default=None, description="settings of SGD")
    schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        default="cosine", description="learning rate schedule after warm-up; WSD: warm-up, stable, decay"
    )
    warmup_steps: int = Field(default=0, ge=0, le=LARGEST_COUNT, description="[steps] of linear warm-up from 0")
    decay_steps: int | None = Field(
        default=None, ge=1, le=LARGEST_COUNT, description="[steps] until min_lr is reached; null: train.steps"
    )
    wsd: WSDConfig | None = Field(default=None, description="the decay of a WSD schedule")
    overrides: tuple[ParamGroupOverride, ...] = Field(
        default=(), strict=False, description="different rates for some parameters"
    )
