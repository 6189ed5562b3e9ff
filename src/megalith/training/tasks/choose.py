"""Chooses the task for a run's settings."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megalith.config import ModelKind, RunConfig
from megalith.errors import ConfigError
from megalith.training.tasks.finetune_classification import FinetuneClassification
from megalith.training.tasks.pretrain_bert import PretrainBert
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.pretrain_t5 import PretrainT5
from megalith.training.tasks.task import AnyTask
from megalith.training.tasks.train_embedding import TrainEmbedding

__all__ = ["task_of"]

# keyed by the kind of model and the head of an encoder
_TASKS: Mapping[tuple[ModelKind, str | None], Callable[[RunConfig], AnyTask]] = MappingProxyType(
    {
        ("gpt", None): PretrainGPT,
        ("bert", "pretraining"): PretrainBert,
        ("bert", "classification"): FinetuneClassification,
        ("bert", "embedding"): TrainEmbedding,
        ("t5", None): PretrainT5,
    }
)


def task_of(config: RunConfig) -> AnyTask:
    """Returns the task for a run whose settings preflight has resolved, by the kind of its model.

    Raises ConfigError for a kind of model that no built-in task trains.
    """
    kind, head = config.model.kind, None if config.model.bert is None else config.model.bert.head
    if (kind, head) not in _TASKS:
        with_head = "" if head is None else f" with head {head}"
        raise ConfigError(f"no built-in task trains a model.{kind}{with_head}; pass your own task to build_run")
    return _TASKS[kind, head](config)
