"""Settings that have an effect only with another setting. Setting one where it has no effect is an error."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalith.config.activations import GATES
from megalith.config.dotted import parent
from megalith.config.draft import Draft, Violation

__all__ = ["CONDITIONS", "Condition", "failed_condition", "has_effect", "no_setting_is_without_effect"]


@dataclass(frozen=True)
class Condition:
    """A field has an effect only if ``setting`` is one of ``values``; without ``values``, if it is set at all."""

    setting: str
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        return value in self.values if self.values else value is not None

    def __str__(self) -> str:
        if self.values == (None,):
            return f"without {self.setting}"
        return f"with {self.setting}" + (f"={' or '.join(map(str, self.values))}" if self.values else "")


_HEAD, _CLASSIFIERS = "model.bert.head", ("classification", "multiple_choice")
_OF_CLASSIFIERS = ("classifier_dropout", "classifier_pooling", "classifier_activation")
_OF_EMBEDDINGS = ("embedding_pooling", "embedding_size", "normalize_embeddings", "similarity_temperature")
_ROUTER = "model.moe.router"
_SCALING = "model.rope.scaling.type"
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_SCHEDULES_THAT_END = ("linear", "cosine", "WSD")

# a field, or a nested group with all of its fields -> the condition for it to have an effect
CONDITIONS: Mapping[str, Condition] = MappingProxyType(
    {
        "model.glu": Condition("model.activation", tuple(GATES)),
        "model.residual.fp32": Condition("model.residual.norm_placement", ("pre", "sandwich")),
        "model.rope": Condition("model.position_embedding_type", ("rope",)),
        "model.relative_position": Condition("model.position_embedding_type", ("relative",)),
        "model.rope.scaling.original_max_position_embeddings": Condition(_SCALING, ("llama3", "yarn")),
        **dict.fromkeys((f"model.rope.scaling.{name}" for name in _LLAMA3), Condition(_SCALING, ("llama3",))),
        **dict.fromkeys((f"model.rope.scaling.{name}" for name in _YARN), Condition(_SCALING, ("yarn",))),
        "model.attention.window_layers": Condition("model.attention.window"),
        "model.bert.binary_head": Condition(_HEAD, ("pretraining",)),
        "model.bert.num_classes": Condition(_HEAD, ("classification",)),
        **dict.fromkeys((f"model.bert.{name}" for name in _OF_CLASSIFIERS), Condition(_HEAD, _CLASSIFIERS)),
        **dict.fromkeys((f"model.bert.{name}" for name in _OF_EMBEDDINGS), Condition(_HEAD, ("embedding",))),
        "model.moe.shared_expert_gate": Condition("model.moe.shared_ffn_hidden_size"),
        f"{_ROUTER}.group_score_topk": Condition(f"{_ROUTER}.num_groups"),
        f"{_ROUTER}.pre_softmax": Condition(f"{_ROUTER}.score_function", ("softmax",)),
        f"{_ROUTER}.expert_bias_update_rate": Condition(f"{_ROUTER}.score_function", ("sigmoid", "sqrtsoftplus")),
        f"{_ROUTER}.quantile_decay": Condition(f"{_ROUTER}.selection", ("quantile",)),
        "model.max_position_embeddings": Condition("model.position_embedding_type", ("learned_absolute",)),
        "train.global_batch_size": Condition("train.batch_size_schedule", (None,)),
        "train.batch_size_schedule_unit": Condition("train.batch_size_schedule"),
        "train.recompute_modules": Condition("train.recompute", ("selective",)),
        "parallel.context_inner": Condition("parallel.context_method", ("two_level",)),
        "optim.adamw": Condition("optim.name", ("adamw",)),
        "optim.sgd": Condition("optim.name", ("sgd",)),
        "optim.min_lr": Condition("optim.schedule", (*_SCHEDULES_THAT_END, "inverse-square-root")),
        # inverse-square-root has no end: cut off at decay_steps it would jump down to min_lr
        "optim.decay_steps": Condition("optim.schedule", _SCHEDULES_THAT_END),
        "optim.wsd": Condition("optim.schedule", ("WSD",)),
        "checkpoint.async_save": Condition("checkpoint.every"),  # the last save of a run is waited for
        "precision.loss_scale": Condition("precision.dtype", ("float16",)),
    }
)


def has_effect(name: str, value_of: Callable[[str], Any]) -> bool:
    """Whether the setting or group ``name`` has an effect; ``value_of`` returns the value of any setting."""
    return failed_condition(name, value_of) is None


def failed_condition(name: str, value_of: Callable[[str], Any]) -> Condition | None:
    """Returns the first failed condition of ``name`` or of a group that contains it; None if all hold."""
    while name:
        condition = CONDITIONS.get(name)
        if condition is not None and not condition.holds(value_of(condition.setting)):
            return condition
        name = parent(name)
    return None


def no_setting_is_without_effect(run: Draft) -> Iterator[Violation]:
    """A field or group that depends on another field (wsd on schedule=WSD, for example) is set only with it."""
    for name in sorted(run.given):
        if (condition := failed_condition(name, run.get)) is None:
            continue
        given = run.get(condition.setting)
        beside = f"without {condition.setting}" if given is None else f"with {condition.setting}={given}"
        only = "" if condition.values in ((), (None,)) else f", only {condition}"
        message = f"{name} ({run.get(name)}) has no effect {beside}{only}"
        yield Violation("no_setting_is_without_effect", name, message, ({name: None},))
