"""Which task a run's settings ask for."""

from megalith.config import RunConfig
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.task import AnyTask

__all__ = ["task_of"]


def task_of(config: RunConfig) -> AnyTask:
    """The task of a run whose settings preflight has resolved."""
    return PretrainGPT(config)
