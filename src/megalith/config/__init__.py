"""Typed settings of a run: one tree, read from YAML or a recipe with dotted overrides, checked as a whole, frozen."""

from megalith.config import experimental
from megalith.config.batch_size_schedule import BatchSizeStage, parse_batch_size_schedule
from megalith.config.loading import as_tree, dump_yaml, load_run, read_tree
from megalith.config.model_parallel_config import ModelParallelConfig
from megalith.config.mtp_config import MTPConfig
from megalith.config.optim_config import (
    AdamWConfig,
    OptimConfig,
    ParamGroupOverride,
    SGDConfig,
    WeightDecayRampConfig,
    WSDConfig,
)
from megalith.config.recipes import preset_names, recipe_names
from megalith.config.run_config import (
    CheckpointConfig,
    DataConfig,
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
from megalith.config.transformer_config import RopeConfig, TransformerConfig

__all__ = [
    "AdamWConfig",
    "BatchSizeStage",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LossScaleConfig",
    "MTPConfig",
    "ModelParallelConfig",
    "OptimConfig",
    "ParamGroupOverride",
    "PrecisionConfig",
    "RopeConfig",
    "RunConfig",
    "SGDConfig",
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
    "violations",
]
