"""Which task a run's settings ask for."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megalith.config import ModelKind, RunConfig
from megalith.errors import ConfigError
from megalith.training.tasks.pretrain_bert import PretrainBert
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.task import AnyTask

__all__ = ["task_of"]

_PRETRAINING: Mapping[ModelKind, Callable[[RunConfig], AnyTask]] = MappingProxyType(
    {"gpt": PretrainGPT, "bert": PretrainBert}
)


def task_of(config: RunConfig) -> AnyTask:
    """The task of a run whose settings preflight has resolved: what its kind of model is pretrained on.

    Raises ConfigError for a kind of model that no task of ours trains.
    """
    kind, bert = config.model.kind, config.model.bert
    head = "pretraining" if bert is None else bert.head
    if kind not in _PRETRAINING or head != "pretraining":
        raise ConfigError(
            f"no task trains the model that model.{kind} describes with the head {head}; give build_run one of your own"
        )
    return _PRETRAINING[kind](config)
