"""Which task a run's settings ask for."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megalith.config import ModelKind, RunConfig, TaskName
from megalith.errors import ConfigError
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.task import AnyTask

__all__ = ["task_of"]

_TASKS: Mapping[TaskName, Callable[[RunConfig], AnyTask]] = MappingProxyType({"pretrain_gpt": PretrainGPT})
_PRETRAINING: Mapping[ModelKind, TaskName] = MappingProxyType({"gpt": "pretrain_gpt"})


def task_of(config: RunConfig) -> AnyTask:
    """The task of a run whose settings preflight has resolved.

    Raises ConfigError for a kind of model that no task of ours trains.
    """
    name = config.task or _PRETRAINING.get(config.model.kind)
    if name is None:
        raise ConfigError(
            f"no task trains the model that model.{config.model.kind} describes; give build_run a task of your own"
        )
    return _TASKS[name](config)
