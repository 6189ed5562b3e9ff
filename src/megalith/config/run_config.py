"""One run: the tree of all settings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from megalith.config.batch_size_schedule import BatchSizeStage, parse_batch_size_schedule
from megalith.config.data_config import DataConfig
from megalith.config.dotted import look_up, parent, put_
from megalith.config.fp8_config import FP8Config
from megalith.config.model_parallel_config import ModelParallelConfig
from megalith.config.optim_config import OptimConfig
from megalith.config.relevance import has_effect
from megalith.config.rules import RUN_RULES, broken
from megalith.config.settings_group import (
    FIELDS_ALONE,
    LARGEST_COUNT,
    LARGEST_SIZE,
    FilePath,
    Follows,
    SettingsGroup,
    draft_of_group,
    group_at,
    value_in,
)
from megalith.config.transformer_config import TransformerConfig
from megalith.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LossScaleConfig",
    "PrecisionConfig",
    "RunConfig",
    "TrainConfig",
    "batch_size_stages",
]


# the names of Megatron's --recompute-modules, where it has one
Recomputable = Literal[
    "core_attn", "self_attn", "cross_attn", "layernorm", "mlp", "mlp_act", "moe", "moe_act", "shared_experts"
]


def _readable(schedule: str) -> str:
    try:
        parse_batch_size_schedule(schedule)
    except ConfigError as error:
        raise ValueError(f"must be stages such as '0:16 10K:32 1M:64' ({error})") from error
    return schedule


def _last_batch_size(train: Mapping[str, Any]) -> int | None:
    schedule = train["batch_size_schedule"]
    return parse_batch_size_schedule(schedule)[-1].global_batch_size if schedule else None


class EvaluationConfig(SettingsGroup):
    """Evaluation on data.valid during training: how often, and on how many samples."""

    dotted_name: ClassVar[str] = "train.evaluation"

    every: int = Field(ge=1, le=LARGEST_COUNT, description="[steps] between evaluations", examples=[100])
    samples: int | None = Field(
        default=None, ge=1, le=LARGEST_COUNT, description="[samples] in an evaluation; null: all of data.valid"
    )


class GenerationConfig(SettingsGroup):
    """Sample text generated from prompts during training."""

    dotted_name: ClassVar[str] = "train.generation"

    every: int = Field(ge=1, le=LARGEST_COUNT, description="[steps] between text samples", examples=[500])
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, strict=False, description="texts to continue, each independently", examples=[["Once upon a time"]]
    )
    max_new_tokens: int = Field(
        default=64,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] generated per prompt at most; each takes a forward pass",
    )
    temperature: float = Field(
        default=0.8, ge=0, description="[factor] by which the logits are divided; 0: the most likely token"
    )


class TrainConfig(SettingsGroup):
    """The training loop: its length, batch sizes, recomputation, evaluation and logging."""

    dotted_name: ClassVar[str] = "train"

    # first, because the default of global_batch_size depends on it
    batch_size_schedule: Annotated[str, AfterValidator(_readable)] | None = Field(
        default=None, description='batch sizes by threshold, such as "0:16 10K:32 1M:64", in place of global_batch_size'
    )
    batch_size_schedule_unit: Literal["samples", "tokens"] = Field(
        default="samples", description="what the thresholds of batch_size_schedule count"
    )
    global_batch_size: int = Field(
        default_factory=Follows(_last_batch_size),
        validate_default=True,  # rejects None: without a schedule this field is required
        ge=1,
        le=LARGEST_SIZE,
        description="[samples] per step over all ranks; required without batch_size_schedule",
        examples=[32],
    )
    steps: int = Field(ge=1, le=LARGEST_COUNT, description="[steps] of the optimizer in the whole run", examples=[1000])
    micro_batch_size: int = Field(
        ge=1, le=LARGEST_SIZE, description="[samples] per forward pass on each rank", examples=[4]
    )
    seed: int = Field(default=1234, ge=0, lt=2**63, description="seed of the weights, data order and dropout")
    deterministic: bool = Field(
        default=False, description="repeating the run gives bitwise identical results, at some cost in speed"
    )
    poison_buffers: bool = Field(
        default=False,
        description="debug mode, which is also deterministic: memory that has not been written yet, or whose "
        "communication has not been waited for, reads as NaN",
    )
    nonfinite: Literal["raise", "skip"] = Field(
        default="raise",
        description="what to do with a step whose gradients are NaN or infinite: raise an error, or skip it",
    )
    recompute: Literal["none", "full", "selective"] = Field(
        default="none",
        description="activations recomputed in backward: none, those of whole layers, or those of recompute_modules",
    )
    recompute_modules: tuple[Recomputable, ...] = Field(
        default=("core_attn",),
        min_length=1,
        strict=False,
        description="what selective recomputation recomputes in every layer: core_attn is attention without its "
        "projections, self_attn and cross_attn include them, layernorm is the norms, mlp_act and moe_act are the "
        "activation alone",
    )
    fused_linear_cross_entropy: bool = Field(
        default=False,
        description="fuse the loss with the output projection, 2048 tokens at a time: logits are not kept but "
        "recomputed in backward",
    )
    compile: bool = Field(default=False, description="torch.compile the layers (experimental: compile)")
    compile_fusions: bool | None = Field(
        default=None,
        description="torch.compile the fused operations on a CPU, which takes about 20 seconds once per machine; null: "
        "if the run is long enough to pay for it; a resumed run keeps its choice",
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="evaluation on data.valid during training; null: only at the end"
    )
    generation: GenerationConfig | None = Field(default=None, description="sample text generated during training")
    log_every: int = Field(default=10, ge=1, le=LARGEST_COUNT, description="[steps] between log lines")
    log_energy: bool = Field(
        default=False,
        description="measure the energy that the devices use in training steps, and log it every log_every steps",
    )
    time_limit: float | None = Field(default=None, gt=0, description="[minutes] after which the run saves and stops")


class LossScaleConfig(SettingsGroup):
    """Dynamic loss scaling (Micikevicius et al. 2017, arXiv:1710.03740), used with dtype=float16."""

    dotted_name: ClassVar[str] = "precision.loss_scale"

    initial: float = Field(default=65536.0, gt=0, description="[factor] on the loss at the start")
    window: int = Field(
        default=1000, ge=1, le=LARGEST_COUNT, description="[steps] without overflow before the scale doubles"
    )
    hysteresis: int = Field(default=2, ge=1, le=LARGEST_COUNT, description="[overflows] before the scale halves")
    minimum: float = Field(default=1.0, gt=0, description="[factor] lower bound of the scale")


class PrecisionConfig(SettingsGroup):
    """The dtype of the computation, FP8 training, and loss scaling."""

    dotted_name: ClassVar[str] = "precision"

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        default="float32", description="dtype of the computation"
    )
    fp8: FP8Config | None = Field(default=None, description="FP8 training")
    loss_scale: LossScaleConfig | None = Field(default=None, description="dynamic loss scaling for float16")


class CheckpointConfig(SettingsGroup):
    """When checkpoints are saved; the run always saves one at its end."""

    dotted_name: ClassVar[str] = "checkpoint"

    every: int | None = Field(
        default=None, ge=1, le=LARGEST_COUNT, description="[steps] between checkpoints; null: only at the end"
    )
    keep: int = Field(default=2, ge=1, le=LARGEST_COUNT, description="[checkpoints] to keep: the newest ones")
    keep_best: bool = Field(
        default=False, description="also keep the checkpoint with the lowest held-out loss, however old"
    )
    async_save: bool = Field(
        default=False, description="write checkpoints while training continues, from a copy in CPU memory"
    )


class RunConfig(SettingsGroup):
    """All settings of one run, as ``load_run`` returns them.

    Constructed directly, it checks the same rules; pydantic.ValidationError (a ValueError) then has no suggestions.
    """

    model: TransformerConfig = Field(description="the model")
    data: DataConfig = Field(description="the datasets")
    train: TrainConfig = Field(description="the training loop")
    optim: OptimConfig = Field(description="the optimizer")
    parallel: ModelParallelConfig = Field(default_factory=ModelParallelConfig, description="the layout")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="the dtype")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="when checkpoints are saved")
    load: FilePath | None = Field(
        default=None, description="checkpoint or Hugging Face folder whose weights the run starts from"
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="auto: resume from the newest checkpoint in the run's folder, if there is one"
    )
    run: FilePath = Field(default="runs/default", description="folder of the run")
    tracking: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = Field(
        default=None,
        strict=False,
        description="trackers that also get the metrics, as files in the run's folder; null: tensorboard if installed",
    )
    experimental: tuple[str, ...] = Field(
        default=(), strict=False, description="names of the experimental features to enable"
    )

    @classmethod
    def complete(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        tree = super().complete(fields)
        _follow_(tree, "optim.decay_steps", "train.steps")
        _follow_(tree, "model.max_position_embeddings", "data.seq_length")
        return tree

    @model_validator(mode="after")
    def _keeps_the_rules(self, info: ValidationInfo) -> Self:
        if info.context is not FIELDS_ALONE and (found := broken(draft_of_group(self), RUN_RULES)):
            raise ValueError("; ".join(violation.message for violation in found))
        return self


def batch_size_stages(train: TrainConfig, seq_length: int) -> tuple[BatchSizeStage, ...]:
    """Returns the stages of the global batch size, from the first sample on; a single stage without a schedule."""
    if train.batch_size_schedule is None:
        return (BatchSizeStage(0, train.global_batch_size),)
    in_tokens = train.batch_size_schedule_unit == "tokens"
    return parse_batch_size_schedule(train.batch_size_schedule, seq_length=seq_length if in_tokens else None)


def _follow_(tree: dict[str, Any], name: str, other_name: str) -> None:
    """Sets the field ``name``, if it is not given and has an effect, to the value of a field of another group."""
    fields, followed = look_up(tree, parent(name)), look_up(tree, other_name)
    if not isinstance(fields, Mapping) or look_up(tree, name) is not None:
        return
    sound = type(followed) is int and followed > 0  # otherwise it is reported separately
    if sound and has_effect(name, value_in(group_at(RunConfig, parent(name)), fields)):
        put_(tree, name, followed)
