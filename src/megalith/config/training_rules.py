"""Rules on training: schedules, evaluation, recomputation, precision and experimental features."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from megalith.config.batch_size_schedule import mend_batch_size_schedule, parse_batch_size_schedule
from megalith.config.draft import Draft, Violation
from megalith.config.experimental import FEATURES, USED_BY, refusal
from megalith.errors import ConfigError

__all__ = [
    "best_checkpoint_is_evaluated",
    "compiler_chooses_what_outputs_are_kept",
    "evaluation_has_data",
    "experimental_features_are_switched_on",
    "loss_scale_starts_above_its_minimum",
    "mup_is_of_adamw",
    "nesterov_needs_momentum",
    "overrides_change_something",
    "rates_fall_to_their_minimum",
    "recomputed_operations_are_named_once",
    "schedule_stages_differ",
    "switched_on_features_are_used",
    "warmup_ends_before_decay",
    "wsd_decay_fits",
]

_LR, _MIN_LR, _OVERRIDES = "optim.lr", "optim.min_lr", "optim.overrides"
_WARMUP, _DECAY, _WSD_DECAY = "optim.warmup_steps", "optim.decay_steps", "optim.wsd.decay_steps"
_FIRST_SCALE, _LEAST_SCALE = "precision.loss_scale.initial", "precision.loss_scale.minimum"
_KEEP_BEST = "checkpoint.keep_best"
_RECOMPUTED = "train.recompute_modules"
_PART_OF = {"core_attn": "self_attn", "mlp_act": "mlp", "moe_act": "moe", "shared_experts": "moe"}
_OUTPUTS = ("layernorm", "mlp_act")  # operations whose output is discarded
_BATCHES, _UNIT = "train.batch_size_schedule", "train.batch_size_schedule_unit"


def rates_fall_to_their_minimum(run: Draft) -> Iterator[Violation]:
    """min_lr is at most lr, and at most max_lr in each override, unless the schedule is constant."""
    lr, min_lr = run[_LR], run[_MIN_LR]
    if run["optim.schedule"] == "constant":
        return  # the rate does not decay
    if min_lr > lr:
        message = f"{_MIN_LR} ({min_lr}) must be at most {_LR} ({lr})"
        fixes = ({_MIN_LR: float(f"{lr / 10:.3g}")}, {_MIN_LR: 0.0})
        yield Violation("rates_fall_to_their_minimum", _MIN_LR, message, fixes)
        return
    overrides = [dict(override) for override in run[_OVERRIDES]]
    for i, override in enumerate(overrides):
        highest, lowest = override.get("max_lr"), override.get("min_lr")
        highest, lowest = lr if highest is None else highest, min_lr if lowest is None else lowest
        if lowest > highest:
            where = f"{_OVERRIDES}[{i}]"
            message = f"{where}: min_lr ({lowest}) must be at most max_lr ({highest}) for match={override['match']!r}"
            mended = [*overrides[:i], override | {"min_lr": highest}, *overrides[i + 1 :]]
            yield Violation("rates_fall_to_their_minimum", where, message, ({_OVERRIDES: mended},))


def overrides_change_something(run: Draft) -> Iterator[Violation]:
    """Each override sets max_lr, min_lr or wd_mult; with a constant schedule min_lr has no effect."""
    overrides = [dict(override) for override in run[_OVERRIDES]]
    for i, override in enumerate(overrides):
        kept = {name: value for name, value in override.items() if value is not None}
        if run["optim.schedule"] == "constant" and kept.pop("min_lr", None) is not None:
            message = f"{_OVERRIDES}[{i}]: min_lr has no effect with optim.schedule=constant"
        elif not kept.keys() - {"match"}:
            message = f"{_OVERRIDES}[{i}] must set max_lr, min_lr or wd_mult; got only match={override['match']!r}"
        else:
            continue
        others = [*overrides[:i], *overrides[i + 1 :]]
        fix = [*overrides[:i], kept, *overrides[i + 1 :]] if kept.keys() - {"match"} else others
        yield Violation("overrides_change_something", f"{_OVERRIDES}[{i}]", message, ({_OVERRIDES: fix},))


def warmup_ends_before_decay(run: Draft) -> Iterator[Violation]:
    """warmup_steps is below decay_steps, or at most train.steps if the schedule has no end."""
    warmup, steps = run[_WARMUP], run["train.steps"]
    end, limit = ("train.steps", steps + 1) if run.get(_DECAY) is None else (_DECAY, run[_DECAY])
    if warmup >= limit:
        relation = "at most" if end == "train.steps" else "below"
        message = f"{_WARMUP} ({warmup}) must be {relation} {end} ({run[end]})"
        shorter = min(run[end] // 10, run[end] - 1)
        fixes = ({_WARMUP: shorter}, {_WARMUP: 0}, {_DECAY: warmup + 1}, {"train.steps": warmup + 1})
        yield Violation("warmup_ends_before_decay", _WARMUP, message, fixes)


def wsd_decay_fits(run: Draft) -> Iterator[Violation]:
    """The decay of WSD fits between the end of warm-up and decay_steps."""
    if run["optim.schedule"] != "WSD":
        return
    room, given = run[_DECAY] - run[_WARMUP], run[_WSD_DECAY]
    if room < 1 or given <= room:
        return  # no room at all is reported by warmup_ends_before_decay
    message = f"{_WSD_DECAY} ({given}) must be at most {_DECAY} - {_WARMUP} ({room})"
    yield Violation("wsd_decay_fits", _WSD_DECAY, message, ({_WSD_DECAY: max(room // 5, 1)},))


def recomputed_operations_are_named_once(run: Draft) -> Iterator[Violation]:
    """recompute_modules lists each module once, and none that is part of another one in the list."""
    if run["train.recompute"] != "selective":
        return  # reported by no_setting_is_without_effect
    names = list(run[_RECOMPUTED])
    kept = [name for name in dict.fromkeys(names) if _PART_OF.get(name) not in names]
    if kept != names:
        again = next(name for name in names if names.count(name) > 1 or _PART_OF.get(name) in names)
        where = f", which is part of {_PART_OF[again]}" if _PART_OF.get(again) in names else " twice"
        message = f"{_RECOMPUTED} lists {again}{where}: it is recomputed only once"
        yield Violation("recomputed_operations_are_named_once", _RECOMPUTED, message, ({_RECOMPUTED: kept},))


def compiler_chooses_what_outputs_are_kept(run: Draft) -> Iterator[Violation]:
    """recompute_modules has no layernorm or mlp_act with compile, which fuses them into the operations after them."""
    names = list(run[_RECOMPUTED])
    outputs = [name for name in names if name in _OUTPUTS]
    if run["train.recompute"] != "selective" or not run["train.compile"] or not outputs:
        return
    message = (
        f"{_RECOMPUTED} cannot contain {' or '.join(outputs)} with train.compile=true: the compiler fuses such "
        "operations with others and decides itself which outputs to keep"
    )
    others = [name for name in names if name not in _OUTPUTS]
    fix: dict[str, Any] = {_RECOMPUTED: others} if others else {_RECOMPUTED: None, "train.recompute": "none"}
    yield Violation("compiler_chooses_what_outputs_are_kept", _RECOMPUTED, message, (fix,))


def nesterov_needs_momentum(run: Draft) -> Iterator[Violation]:
    """nesterov needs momentum above 0."""
    if run["optim.sgd.nesterov"] and run["optim.sgd.momentum"] == 0:
        message = "optim.sgd.nesterov=true needs optim.sgd.momentum above 0; got 0.0"
        fixes = ({"optim.sgd.momentum": 0.9}, {"optim.sgd.nesterov": False})
        yield Violation("nesterov_needs_momentum", "optim.sgd.nesterov", message, fixes)


def mup_is_of_adamw(run: Draft) -> Iterator[Violation]:
    """model.mup needs optim.name=adamw, whose learning rates and eps it scales with the width."""
    name, optimizer = "model.mup.base_hidden_size", run["optim.name"]
    if run.get(name) is not None and optimizer != "adamw":
        message = f"model.mup needs optim.name=adamw, whose learning rates it scales with the width; got {optimizer}"
        yield Violation("mup_is_of_adamw", "model.mup", message, ({"optim.name": "adamw"}, {"model.mup": None}))


def schedule_stages_differ(run: Draft) -> Iterator[Violation]:
    """The thresholds of a batch size schedule in tokens fall into different samples."""
    if (text := run.get(_BATCHES)) is None or run[_UNIT] != "tokens":
        return
    length = run["data.seq_length"]
    try:
        parse_batch_size_schedule(text, seq_length=length)
    except ConfigError as error:
        message = f"{_BATCHES}, in tokens with data.seq_length={length}: {error}"
        fixes = ({_BATCHES: mend_batch_size_schedule(text, seq_length=length)}, {_UNIT: "samples"})
        yield Violation("schedule_stages_differ", _BATCHES, message, fixes)


def evaluation_has_data(run: Draft) -> Iterator[Violation]:
    """train.evaluation needs data.valid."""
    if "train.evaluation.every" in run.given and run.get("data.valid") is None:
        message = "train.evaluation needs data.valid, which is not set"
        yield Violation("evaluation_has_data", "train.evaluation", message, ({"train.evaluation": None},))


def best_checkpoint_is_evaluated(run: Draft) -> Iterator[Violation]:
    """checkpoint.keep_best needs data.valid, checkpoint.every, and an evaluation at every checkpoint."""
    if not run[_KEEP_BEST]:
        return
    saved, evaluated = run.get("checkpoint.every"), run.get("train.evaluation.every")
    fixes: tuple[dict[str, Any], ...] = ()
    if run.get("data.valid") is None:
        message = f"{_KEEP_BEST} needs data.valid, which is not set"
    elif saved is None:
        message = f"{_KEEP_BEST} needs checkpoint.every; without it there is only one checkpoint, at the end"
        fixes = ({"checkpoint.every": evaluated},) if evaluated else ()
    elif evaluated is None or saved % evaluated:
        message = (
            f"{_KEEP_BEST} needs an evaluation at every checkpoint: checkpoint.every ({saved}) must be a multiple of "
            f"train.evaluation.every ({evaluated})"
        )
        fixes = ({"train.evaluation.every": saved},)
    else:
        return
    yield Violation("best_checkpoint_is_evaluated", _KEEP_BEST, message, (*fixes, {_KEEP_BEST: False}))


def loss_scale_starts_above_its_minimum(run: Draft) -> Iterator[Violation]:
    """The minimum of the loss scale is at most its initial value."""
    least, first = run[_LEAST_SCALE], run[_FIRST_SCALE]
    if run["precision.dtype"] == "float16" and least > first:
        message = f"{_LEAST_SCALE} ({least}) must be at most {_FIRST_SCALE} ({first})"
        fixes = ({_LEAST_SCALE: first}, {_FIRST_SCALE: least})
        yield Violation("loss_scale_starts_above_its_minimum", _LEAST_SCALE, message, fixes)


def experimental_features_are_switched_on(run: Draft) -> Iterator[Violation]:
    """A run that uses an experimental feature names it in `experimental`."""
    switched_on = list(run["experimental"])
    for feature, (setting, value) in USED_BY.items():
        if run.get(setting) == value and feature not in switched_on:
            fixes = ({"experimental": [*switched_on, feature]}, {setting: None})
            yield Violation("experimental_features_are_switched_on", setting, refusal(feature), fixes)


def switched_on_features_are_used(run: Draft) -> Iterator[Violation]:
    """`experimental` names only features that exist and that the run uses."""
    switched_on = list(run["experimental"])
    for feature in switched_on:
        others = [name for name in switched_on if name != feature]
        fixes = [{"experimental": [*others, near]} for near in get_close_matches(feature, FEATURES)]
        if feature not in FEATURES:
            message = f"experimental: {feature!r} is not a feature; available: {', '.join(FEATURES)}"
        elif run.get(USED_BY[feature].setting) != USED_BY[feature].value:
            message, fixes = f"experimental: {feature!r} has no effect without {USED_BY[feature]}", []
        else:
            continue
        name = f"experimental[{feature}]"
        yield Violation("switched_on_features_are_used", name, message, (*fixes, {"experimental": others or None}))
