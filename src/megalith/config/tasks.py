"""The names of tasks, and the kinds of model that each can train."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

__all__ = ["TASKS", "ModelKind", "TaskName"]

# a group of settings in ``model`` decides: model.bert makes a BERT, and without it the model is a GPT
ModelKind = Literal["gpt", "bert"]
TaskName = Literal["pretrain_gpt"]

TASKS: Mapping[TaskName, tuple[ModelKind, ...]] = MappingProxyType({"pretrain_gpt": ("gpt",)})
