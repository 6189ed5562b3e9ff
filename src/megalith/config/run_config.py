"""One run: the tree of all settings."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from megalith.config.batch_size_schedule import BatchSizeStage, parse_batch_size_schedule
from megalith.config.dotted import look_up, parent, put_
from megalith.config.fill_in_the_middle_config import FillInTheMiddleConfig
from megalith.config.masking_config import MaskingConfig
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
    "VALID_KINDS",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LossScaleConfig",
    "PrecisionConfig",
    "RunConfig",
    "TrainConfig",
    "batch_size_stages",
    "valid_setting",
]


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError("must be a name of letters, digits, _ and -")
    return name


# what data.valid may be, by which pydantic's errors are about the kind that was meant
VALID_KINDS = ("prefix", "named prefixes")
_NamedPrefixes = Annotated[Mapping[Annotated[str, AfterValidator(_plain_name)], FilePath], Field(min_length=1)]
_ValidSets = Annotated[
    Annotated[FilePath, Tag(VALID_KINDS[0])] | Annotated[_NamedPrefixes, Tag(VALID_KINDS[1])],
    Discriminator(lambda given: VALID_KINDS[isinstance(given, Mapping)]),
]


# names of Megatron's --recompute-modules, where it has one
Recomputable = Literal[
    "core_attn", "self_attn", "cross_attn", "layernorm", "mlp", "mlp_act", "moe", "moe_act", "shared_experts"
]


class DataConfig(SettingsGroup):
    """What is read. Datasets are pairs of files PREFIX.bin and PREFIX.idx."""

    dotted_name: ClassVar[str] = "data"

    train: FilePath | None = Field(default=None, description="prefix of the dataset to train on")
    valid: _ValidSets | None = Field(
        default=None, description="prefix of the dataset to evaluate on, or several of them by name: {web: PREFIX, ...}"
    )
    tokenizer: FilePath | None = Field(
        default=None, description="path of a tokenizer.json; null: the one that the dataset names"
    )
    seq_length: int = Field(ge=1, le=LARGEST_SIZE, description="[tokens] in a sample", examples=[1024])
    reset_attention_mask: bool = Field(default=False, description="documents in one sample do not attend to each other")
    reset_position_ids: bool = Field(default=False, description="positions start again at 0 with every document")
    eod_mask_loss: bool = Field(default=False, description="no loss where the input token ends a document")
    fill_in_the_middle: FillInTheMiddleConfig | None = Field(
        default=None, description="which documents a GPT reads in another order, so that it learns to fill gaps"
    )
    masking: MaskingConfig | None = Field(default=None, description="which tokens a BERT or a T5 is to fill in")
    decoder_seq_length: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[tokens] of a T5's decoder in a sample; null: as many as any sample needs, a multiple of 16",
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a mapping has none

    @property
    def valid_sets(self) -> Mapping[str, str]:
        """Prefix by name, in the order given; a single prefix has the name ""."""
        if self.valid is None:
            return MappingProxyType({})
        return MappingProxyType({"": self.valid} if isinstance(self.valid, str) else dict(self.valid))


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
    """The loss on data.valid while the run goes on, and how much of it is read."""

    dotted_name: ClassVar[str] = "train.evaluation"

    every: int = Field(ge=1, le=LARGEST_COUNT, description="[steps] between evaluations", examples=[100])
    samples: int | None = Field(
        default=None, ge=1, le=LARGEST_COUNT, description="[samples] in an evaluation; null: all of data.valid"
    )


class GenerationConfig(SettingsGroup):
    """Text that the model adds to prompts while the run goes on."""

    dotted_name: ClassVar[str] = "train.generation"

    every: int = Field(ge=1, le=LARGEST_COUNT, description="[steps] between samples of text", examples=[500])
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, strict=False, description="what to go on from, each on its own", examples=[["Once upon a time"]]
    )
    max_new_tokens: int = Field(
        default=64, ge=1, le=LARGEST_SIZE, description="[tokens] added to a prompt, at most; each is a forward pass"
    )
    temperature: float = Field(
        default=0.8, ge=0, description="[factor] that divides the logits; 0: the likeliest token"
    )


class TrainConfig(SettingsGroup):
    """How long, in which batches, and what happens on the way."""

    dotted_name: ClassVar[str] = "train"

    # first, so that global_batch_size waits for no other field
    batch_size_schedule: Annotated[str, AfterValidator(_readable)] | None = Field(
        default=None, description='batch sizes by threshold, as "0:16 10K:32 1M:64", in place of global_batch_size'
    )
    batch_size_schedule_unit: Literal["samples", "tokens"] = Field(
        default="samples", description="what the thresholds of batch_size_schedule count"
    )
    global_batch_size: int = Field(
        default_factory=Follows(_last_batch_size),
        validate_default=True,  # None is refused: without a schedule this field is required
        ge=1,
        le=LARGEST_SIZE,
        description="[samples] in a step, over all ranks; required without batch_size_schedule",
        examples=[32],
    )
    steps: int = Field(ge=1, le=LARGEST_COUNT, description="[steps] of the optimizer in the whole run", examples=[1000])
    micro_batch_size: int = Field(
        ge=1, le=LARGEST_SIZE, description="[samples] in one forward pass of one rank", examples=[4]
    )
    seed: int = Field(default=1234, ge=0, lt=2**63, description="of weights, data order and dropout")
    deterministic: bool = Field(
        default=False, description="the same run twice gives the same bits, at some cost in speed"
    )
    poison_buffers: bool = Field(
        default=False,
        description="a debug mode, deterministic too: memory that nothing was written to yet, or whose message was not "
        "waited for, reads as NaN",
    )
    nonfinite: Literal["raise", "skip"] = Field(
        default="raise", description="a step whose gradients are NaN or infinite"
    )
    recompute: Literal["none", "full", "selective"] = Field(
        default="none",
        description="activations computed again in backward: none, of whole layers, or those of recompute_modules",
    )
    recompute_modules: tuple[Recomputable, ...] = Field(
        default=("core_attn",),
        min_length=1,
        strict=False,
        description="what selective recomputation computes again in every layer: attention between its projections, or "
        "with them, cross attention with them, norms, the MLP, or its activation alone, the mixture of experts, its "
        "activation, or shared experts",
    )
    fused_linear_cross_entropy: bool = Field(
        default=False,
        description="the loss together with the output projection, for 4096 tokens at a time: their logits are not "
        "kept, and are computed again in backward",
    )
    compile: bool = Field(default=False, description="torch.compile of the layers; experimental, by the name compile")
    compile_fusions: bool | None = Field(
        default=None,
        description="torch.compile of the fused operations, on a CPU: some 25 seconds once a machine; by default where "
        "the run is long enough to repay them, and as it has begun",
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="the loss on data.valid on the way; left out, it is taken at the end only"
    )
    generation: GenerationConfig | None = Field(default=None, description="text that the model writes on the way")
    log_every: int = Field(default=10, ge=1, le=LARGEST_COUNT, description="[steps] between lines of the log")
    time_limit: float | None = Field(default=None, gt=0, description="[minutes] after which the run saves and stops")


class LossScaleConfig(SettingsGroup):
    """The dynamic loss scale (Micikevicius et al. 2017, arXiv:1710.03740), with dtype=float16."""

    dotted_name: ClassVar[str] = "precision.loss_scale"

    initial: float = Field(default=65536.0, gt=0, description="[factor] on the loss at the start")
    window: int = Field(
        default=1000, ge=1, le=LARGEST_COUNT, description="[steps] without overflow before the scale doubles"
    )
    hysteresis: int = Field(default=2, ge=1, le=LARGEST_COUNT, description="[overflows] before the scale halves")
    minimum: float = Field(default=1.0, gt=0, description="[factor] below which the scale does not fall")


class PrecisionConfig(SettingsGroup):
    """The dtype of the computation, and what it needs."""

    dotted_name: ClassVar[str] = "precision"

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        default="float32", description="of the computation"
    )
    loss_scale: LossScaleConfig | None = Field(default=None, description="the factor on the loss of float16")


class CheckpointConfig(SettingsGroup):
    """When the run saves itself; it always does at its end."""

    dotted_name: ClassVar[str] = "checkpoint"

    every: int | None = Field(
        default=None, ge=1, le=LARGEST_COUNT, description="[steps] between checkpoints; null: only at the end"
    )
    keep: int = Field(default=2, ge=1, le=LARGEST_COUNT, description="[checkpoints] kept, the newest")
    keep_best: bool = Field(default=False, description="keep the one with the lowest held-out loss too, however old")


class RunConfig(SettingsGroup):
    """All settings of one run, as ``load_run`` gives them.

    Built directly it keeps the same rules and raises pydantic.ValidationError (a ValueError), which suggests nothing.
    """

    model: TransformerConfig = Field(description="the model")
    data: DataConfig = Field(description="what is read")
    train: TrainConfig = Field(description="how long and in which batches")
    optim: OptimConfig = Field(description="the optimizer")
    parallel: ModelParallelConfig = Field(default_factory=ModelParallelConfig, description="the layout")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="the dtype")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="when the run saves itself")
    load: FilePath | None = Field(
        default=None, description="checkpoint or Hugging Face folder whose weights the run starts from"
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="go on from the newest checkpoint in the run's folder"
    )
    run: FilePath = Field(default="runs/default", description="folder of the run")
    tracking: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = Field(
        default=None,
        strict=False,
        description="dashboards that get the numbers too, in files of the run's folder; null: tensorboard if installed",
    )
    experimental: tuple[str, ...] = Field(
        default=(), strict=False, description="names of experimental features switched on"
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


def valid_setting(set_name: str) -> str:
    """Where the prefix of a validation set is given: data.valid, or data.valid.web of the set ``web``."""
    return f"data.valid.{set_name}" if set_name else "data.valid"


def batch_size_stages(train: TrainConfig, seq_length: int) -> tuple[BatchSizeStage, ...]:
    """The global batch size over the run, from its first sample; a single stage without a schedule."""
    if train.batch_size_schedule is None:
        return (BatchSizeStage(0, train.global_batch_size),)
    in_tokens = train.batch_size_schedule_unit == "tokens"
    return parse_batch_size_schedule(train.batch_size_schedule, seq_length=seq_length if in_tokens else None)


def _follow_(tree: dict[str, Any], name: str, other_name: str) -> None:
    """Sets the field ``name``, if it is left out and has an effect, to a field of another group."""
    fields, followed = look_up(tree, parent(name)), look_up(tree, other_name)
    if not isinstance(fields, Mapping) or look_up(tree, name) is not None:
        return
    sound = type(followed) is int and followed > 0  # or else it is reported in its own place
    if sound and has_effect(name, value_in(group_at(RunConfig, parent(name)), fields)):
        put_(tree, name, followed)
