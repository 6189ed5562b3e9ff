"""Typed settings of a run: one tree, read from YAML or a recipe with dotted overrides, checked as a whole, frozen."""

from megalith.config import experimental
from megalith.config.attention_config import AttentionConfig
from megalith.config.batch_size_schedule import BatchSizeStage, parse_batch_size_schedule
from megalith.config.bert_config import BertConfig
from megalith.config.data_config import BlendPhaseConfig, DataConfig, train_setting, valid_setting
from megalith.config.dispatch_config import DispatchConfig
from megalith.config.fill_in_the_middle_config import FillInTheMiddleConfig
from megalith.config.fp8_config import FP8Config
from megalith.config.glu_config import GluConfig
from megalith.config.loading import as_tree, dump_yaml, load_run, read_tree
from megalith.config.masking_config import MaskingConfig
from megalith.config.mla_config import MLAConfig
from megalith.config.model_kind import ModelKind
from megalith.config.model_parallel_config import ModelParallelConfig
from megalith.config.moe_config import CapacityConfig, MoEConfig
from megalith.config.mtp_config import MTPConfig
from megalith.config.multipliers_config import MultipliersConfig
from megalith.config.mup_config import MuPConfig
from megalith.config.optim_config import (
    AdamWConfig,
    OptimConfig,
    ParamGroupOverride,
    SGDConfig,
    WeightDecayRampConfig,
    WSDConfig,
)
from megalith.config.recipes import preset_names, recipe_names
from megalith.config.relative_position_config import RelativePositionConfig
from megalith.config.residual_config import ResidualConfig
from megalith.config.rope_config import RopeConfig, RopeScalingConfig
from megalith.config.router_config import RouterConfig
from megalith.config.run_config import (
    CheckpointConfig,
    EvaluationConfig,
    GenerationConfig,
    LossScaleConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
    batch_size_stages,
)
from megalith.config.schema import json_schema
from megalith.config.suggestions import violations
from megalith.config.t5_config import T5Config
from megalith.config.transformer_config import TransformerConfig

__all__ = [
    "AdamWConfig",
    "AttentionConfig",
    "BatchSizeStage",
    "BertConfig",
    "BlendPhaseConfig",
    "CapacityConfig",
    "CheckpointConfig",
    "DataConfig",
    "DispatchConfig",
    "EvaluationConfig",
    "FP8Config",
    "FillInTheMiddleConfig",
    "GenerationConfig",
    "GluConfig",
    "LossScaleConfig",
    "MLAConfig",
    "MTPConfig",
    "MaskingConfig",
    "MoEConfig",
    "ModelKind",
    "ModelParallelConfig",
    "MuPConfig",
    "MultipliersConfig",
    "OptimConfig",
    "ParamGroupOverride",
    "PrecisionConfig",
    "RelativePositionConfig",
    "ResidualConfig",
    "RopeConfig",
    "RopeScalingConfig",
    "RouterConfig",
    "RunConfig",
    "SGDConfig",
    "T5Config",
    "TrainConfig",
    "TransformerConfig",
    "WSDConfig",
    "WeightDecayRampConfig",
    "as_tree",
    "batch_size_stages",
    "dump_yaml",
    "experimental",
    "json_schema",
    "load_run",
    "parse_batch_size_schedule",
    "preset_names",
    "read_tree",
    "recipe_names",
    "train_setting",
    "valid_setting",
    "violations",
]
