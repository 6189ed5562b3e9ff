"""Rules on the datasets of a run and the weights by which they are blended."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from megalith.config.draft import Draft, Fix, Violation

__all__ = [
    "blended_datasets_are_drawn",
    "blends_have_no_classes",
    "fixes_of_a_list",
    "phases_follow_each_other",
    "several_datasets_have_names",
    "weights_are_of_several_datasets",
    "weights_name_every_dataset",
]

_TRAIN, _VALID, _WEIGHTS, _PHASES = "data.train", "data.valid", "data.weights", "data.phases"


def several_datasets_have_names(run: Draft) -> Iterator[Violation]:
    """Several datasets are given by name, not as one text with weights as in Megatron's --data-path."""
    for name in (_TRAIN, _VALID):
        given = run.get(name)
        if isinstance(given, str) and re.fullmatch(r"\s*[0-9.]+\s+\S+(\s+[0-9.]+\s+\S+)*\s*", given):
            message = f"{name} must be a prefix, or several by name: {{web: PREFIX, code: PREFIX}}; got {given!r}"
            yield Violation("several_datasets_have_names", name, message, tuple(fixes_of_a_list(name, given.split())))


def fixes_of_a_list(name: str, given: Sequence[Any]) -> Iterator[Fix]:
    """Yields a fix for datasets given in Megatron's form, as prefixes, or as weights and prefixes in turn."""
    prefixes = [str(each) for each in given]
    weights: list[float] = []
    with suppress(ValueError):
        weights = [float(each) for each in prefixes[::2]]
        prefixes = prefixes[1::2]
    names = [re.sub(r"[^A-Za-z0-9_-]", "-", os.path.basename(prefix)) for prefix in prefixes]
    if not prefixes or len({*names} - {""}) < len(prefixes):
        return  # no names to suggest
    fix: dict[str, Any] = {name: dict(zip(names, prefixes, strict=True))}
    if name == _TRAIN and len(weights) == len(names) > 1:
        fix[_WEIGHTS] = dict(zip(names, weights, strict=True))
    yield fix


def weights_are_of_several_datasets(run: Draft) -> Iterator[Violation]:
    """weights and phases need several datasets in data.train, by name."""
    if len(_names(run)) > 1:
        return
    for name in (name for name in (_WEIGHTS, _PHASES) if run.get(name)):
        message = (
            f"{name} has no effect with one dataset in {_TRAIN}; name several to blend them: "
            "data.train='{web: PREFIX, code: PREFIX}'"
        )
        yield Violation("weights_are_of_several_datasets", name, message, ({name: None},))


def weights_name_every_dataset(run: Draft) -> Iterator[Violation]:
    """weights, those of every phase too, give one number for each name in data.train, not all of them 0."""
    names = _names(run)
    if len(names) < 2:
        return
    for where, weights, changed in _all_weights(run):
        unknown, missing = [name for name in weights if name not in names], [n for n in names if n not in weights]
        if unknown:
            near = get_close_matches(unknown[0], missing, 1)
            rest = {name: weight for name, weight in weights.items() if name != unknown[0]}
            message = f"{where} names {unknown[0]}, which is not in {_TRAIN} ({', '.join(names)})"
            fixes = [changed({**rest, name: weights[unknown[0]]}) for name in near] + [changed(rest)]
        elif missing:
            message = f"{where} has no weight for {missing[0]} of {_TRAIN}; give it one, 0 to leave it out"
            fixes = [changed({**weights, missing[0]: weight}) for weight in (1.0, 0.0)]
        elif not any(weights.values()):
            message = f"{where} must have a weight above 0; all are 0"
            fixes = [changed(dict.fromkeys(names, 1.0))]
        else:
            continue
        yield Violation("weights_name_every_dataset", where, message, tuple(fixes))


def blended_datasets_are_drawn(run: Draft) -> Iterator[Violation]:
    """Every dataset in data.train has a weight above 0 in some phase, and its own files."""
    names, prefixes = _names(run), run.get(_TRAIN)
    if len(names) < 2:
        return
    found = [weights for _, weights, _ in _all_weights(run)]
    if run.get(_WEIGHTS) is not None and all(weights.keys() == {*names} and any(weights.values()) for weights in found):
        for name in (name for name in names if not any(weights[name] for weights in found)):
            message = f"{_TRAIN}.{name} is never read, because its weight is 0; leave it out, or give it a weight"
            fix = {_WEIGHTS: {**run[_WEIGHTS], name: 1.0}}
            yield Violation("blended_datasets_are_drawn", f"{_TRAIN}.{name}", message, (fix,))
    places = {name: os.path.abspath(prefix) if "://" not in prefix else prefix for name, prefix in prefixes.items()}
    for number, name in enumerate(names):
        for other in (other for other in names[:number] if places[other] == places[name]):
            message = (
                f"{_TRAIN}.{other} and {_TRAIN}.{name} are the same dataset ({prefixes[name]}), whose samples would be "
                "drawn twice in the same order; name it once, with both weights"
            )
            yield Violation("blended_datasets_are_drawn", f"{_TRAIN}.{name}", message, (_without(run, name),))


def phases_follow_each_other(run: Draft) -> Iterator[Violation]:
    """The first_sample of each entry of phases is above that of the entry before it."""
    phases = [dict(phase) for phase in run.get(_PHASES) or ()]
    ordered = sorted({phase["first_sample"]: phase for phase in phases}.values(), key=lambda each: each["first_sample"])
    if ordered != phases:
        firsts = ", ".join(str(phase["first_sample"]) for phase in phases)
        message = f"the first_sample of each entry of {_PHASES} must be above that of the one before; got {firsts}"
        yield Violation("phases_follow_each_other", _PHASES, message, ({_PHASES: ordered},))


def blends_have_no_classes(run: Draft) -> Iterator[Violation]:
    """bert.head=classification learns from one dataset in data.train."""
    if run.get("model.bert.head") == "classification" and isinstance(run.get(_TRAIN), Mapping):
        message = (
            f"{_TRAIN} must be one dataset for model.bert.head=classification, because its labels number the classes "
            "of one; put the texts into one file, and label that: megalith data label FILE --out PREFIX"
        )
        yield Violation("blends_have_no_classes", _TRAIN, message, (_only(run, next(iter(run[_TRAIN]))),))


def _names(run: Draft) -> list[str]:
    """Returns the names in data.train; none if it is a single prefix."""
    train = run.get(_TRAIN)
    return list(train) if isinstance(train, Mapping) else []


def _only(run: Draft, name: str) -> Fix:
    """Returns the fix that trains on the dataset ``name`` alone."""
    return {_TRAIN: run[_TRAIN][name], **dict.fromkeys(other for other in (_WEIGHTS, _PHASES) if run.get(other))}


def _without(run: Draft, name: str) -> Fix:
    """Returns the fix that leaves the dataset ``name`` out of data.train and all weights."""

    def others(by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {other: value for other, value in by_name.items() if other != name}

    fix: dict[str, Any] = {_TRAIN: others(run[_TRAIN])}
    if len(fix[_TRAIN]) == 1:
        return _only(run, *fix[_TRAIN])
    if (weights := run.get(_WEIGHTS)) is not None:
        fix[_WEIGHTS] = others(weights)
    if phases := [dict(phase) for phase in run.get(_PHASES) or ()]:
        fix[_PHASES] = [{**phase, "weights": others(phase["weights"])} for phase in phases]
    return fix


def _all_weights(run: Draft) -> Iterator[tuple[str, dict[str, float], Any]]:
    """Yields the name and value of each setting with weights, and a function from other weights to a fix."""
    if (weights := run.get(_WEIGHTS)) is not None:
        yield _WEIGHTS, dict(weights), lambda others: {_WEIGHTS: others}
    phases = [dict(phase) for phase in run.get(_PHASES) or ()]
    for number, phase in enumerate(phases):

        def changed(others: Mapping[str, float], number: int = number) -> Fix:
            return {_PHASES: [*phases[:number], {**phases[number], "weights": others}, *phases[number + 1 :]]}

        yield f"{_PHASES}[{number}].weights", dict(phase["weights"]), changed
