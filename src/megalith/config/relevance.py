"""Which settings have an effect only beside another one. Setting such a field where it has none is an error."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.config.draft import Draft, Violation

__all__ = ["CONDITIONS", "Condition", "has_effect", "no_setting_is_without_effect"]


@dataclass(frozen=True)
class Condition:
    """A field has an effect only while ``setting`` is one of ``values``; no ``values`` means: while it is set."""

    setting: str
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        return value in self.values if self.values else value is not None

    def __str__(self) -> str:
        if self.values == (None,):
            return f"without {self.setting}"
        return f"with {self.setting}" + (f"={' or '.join(map(str, self.values))}" if self.values else "")


_SCHEDULES_THAT_END = ("linear", "cosine", "WSD")

CONDITIONS: Mapping[str, Condition] = {
    "model.rotary_base": Condition("model.position_embedding_type", ("rope",)),
    "model.max_position_embeddings": Condition("model.position_embedding_type", ("learned_absolute",)),
    "train.global_batch_size": Condition("train.batch_size_schedule", (None,)),
    "train.batch_size_schedule_unit": Condition("train.batch_size_schedule"),
    "train.eval_samples": Condition("train.eval_every"),
    "optim.min_lr": Condition("optim.schedule", (*_SCHEDULES_THAT_END, "inverse-square-root")),
    # inverse-square-root has no end: cut off at decay_steps it would jump down to min_lr
    "optim.decay_steps": Condition("optim.schedule", _SCHEDULES_THAT_END),
    "optim.wsd_decay_steps": Condition("optim.schedule", ("WSD",)),
    "optim.wsd_decay_style": Condition("optim.schedule", ("WSD",)),
    "optim.end_weight_decay": Condition("optim.weight_decay_schedule", ("linear", "cosine")),
    "precision.initial_loss_scale": Condition("precision.dtype", ("float16",)),
    "precision.loss_scale_window": Condition("precision.dtype", ("float16",)),
    "precision.hysteresis": Condition("precision.dtype", ("float16",)),
    "precision.min_loss_scale": Condition("precision.dtype", ("float16",)),
}


def has_effect(name: str, value_of: Callable[[str], Any]) -> bool:
    """Whether the setting ``name`` does anything, where ``value_of`` gives the value of any setting."""
    condition = CONDITIONS.get(name)
    return condition is None or condition.holds(value_of(condition.setting))


def no_setting_is_without_effect(run: Draft) -> Iterator[Violation]:
    """A field that needs another one (rotary_base needs rope, wsd_decay_steps needs WSD, ...) is set beside it only."""
    for name, condition in CONDITIONS.items():
        if name not in run.given or has_effect(name, run.get):
            continue
        given = run.get(condition.setting)
        beside = f"without {condition.setting}" if given is None else f"with {condition.setting}={given}"
        only = "" if condition.values in ((), (None,)) else f", only {condition}"
        message = f"{name} ({run.get(name)}) has no effect {beside}{only}"
        yield Violation("no_setting_is_without_effect", name, message, ({name: None},))
