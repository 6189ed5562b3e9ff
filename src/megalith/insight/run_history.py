"""Reads and summarizes the files in a run's folder.

metrics.jsonl      training records and evaluations (observe/metrics.py); the only required file
evaluation.json    {"valid_loss", "unigram_loss", "bigram_loss"}, nats per token of held-out text
samples.json       [{"prompt", "text"}, ...]; without it, the latest texts that training has recorded
about.json         {"parameters": count, "recipe", "model", "started", "command", "loss_over": what the loss is a mean
                   over, in the plural, and other facts such as versions, the machine, the dtype}
config.yaml        the resolved settings
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from megalith.errors import DataError
from megalith.input_file import read_regular_file
from megalith.observe.metrics import COMPILE, held_out_loss, read_metrics
from megalith.storage.json_fields import float_sized

__all__ = ["LayerLoads", "Phase", "RunHistory", "read_run"]

_MOST_BYTES = 1 << 26  # of each file other than the metrics


@dataclass(frozen=True)
class Phase:
    """Consecutive steps in one layout."""

    layout: str
    first_step: int
    last_step: int
    step_seconds: float  # median, without compile time; NaN if it was not recorded
    time: Mapping[str, float]  # median seconds per step by outermost span, without compile time


@dataclass(frozen=True)
class LayerLoads:
    """Loads of a layer's experts, or of ranges of adjacent experts, relative to the mean."""

    means: list[float]  # of each expert or range
    least: list[float] | None  # of each range; None if there are no ranges
    greatest: float  # of any expert


@dataclass(frozen=True)
class RunHistory:
    """A run's records, in order of steps, and its other files; missing ones are empty."""

    name: str
    folder: Path
    training: list[dict[str, Any]]
    evaluations: list[tuple[int, float]]  # (step, held-out loss)
    valid_sets: Mapping[str, list[tuple[int, float]]]  # the same for each named validation set
    datasets: Mapping[str, tuple[float, float]]  # (samples, epochs) read of each blended training dataset
    measures: list[tuple[int, Mapping[str, float]]]  # (step, {term or measure: mean}) of evaluations with several
    classes: Sequence[str]  # class names, by the indices in measures, from the last evaluation
    expert_loads: list[tuple[int, dict[int, LayerLoads]]]  # (step, {layer: loads})
    phases: list[Phase]
    time: Mapping[str, float]  # seconds of the whole run: "training" steps, "compile", and work between the steps
    joules: float  # of the training steps, as far as they were measured
    evaluation: Mapping[str, Any]
    samples: list[Mapping[str, Any]]
    about: Mapping[str, Any]
    settings: str

    def column(self, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of the training records with a number in ``field``."""
        found = [(record["step"], float(record[field])) for record in self.training if _is_number(record.get(field))]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, field: str) -> float | None:
        """The last number in ``field``, or None."""
        values = self.column(field)[1]
        return values[-1] if values else None

    @property
    def seconds(self) -> float:
        """Total recorded time, without work lost in crashes; NaN if no step was timed."""
        return math.fsum(self.time.values()) if "training" in self.time else math.nan

    @property
    def step_seconds(self) -> float:
        """Median step time without compile time; NaN if no step was timed."""
        return _median([seconds for record in self.training if (seconds := _work_seconds(record)) > 0])

    @property
    def loss_over(self) -> str:
        """What the loss is a mean over, in the plural; tokens, if the run does not say."""
        return str(self.about.get("loss_over", "tokens"))

    @property
    def loss_unit(self) -> str:
        """The unit of the loss: "nats per token"."""
        return f"nats per {self.loss_over.removesuffix('s')}"

    @property
    def valid_loss(self) -> float | None:
        """The final held-out loss, from evaluation.json or else from the last evaluation during training."""
        loss = self.evaluation.get("valid_loss")
        if _is_number(loss):
            return float(loss)
        return self.evaluations[-1][1] if self.evaluations else None


def read_run(folder: Path) -> RunHistory:
    """Reads ``folder``. Raises DataError if there is no training record, or if a file is damaged."""
    records = read_metrics(folder)
    training = sorted((record for record in records if "loss" in record), key=lambda record: record["step"])
    if not training:
        raise DataError(
            f"{folder / 'metrics.jsonl'} must contain a record of at least one training step; it has none; "
            "train for at least one step first"
        )
    evaluations = {record["step"]: float(loss) for record in records if _is_number(loss := record.get("valid_loss"))}
    settings = folder / "config.yaml"
    return RunHistory(
        name=folder.resolve().name,
        folder=folder,
        training=training,
        evaluations=sorted(evaluations.items()),
        valid_sets={name: _losses_of_set(records, name) for record in records for name in record.get("valid_sets", {})},
        datasets=next((found for record in reversed(training) if (found := _datasets(record))), {}),
        measures=sorted(_measures(records).items()),
        classes=next((names for record in reversed(records) if (names := _names(record.get("classes")))), []),
        expert_loads=[(record["step"], loads) for record in training if (loads := _expert_loads(record))],
        phases=_phases(training),
        time=_time(records),
        joules=_joules(records),
        evaluation=_json(folder / "evaluation.json", dict),
        samples=_samples(folder, records),
        about=_json(folder / "about.json", dict),
        settings=settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else "",
    )


def _losses_of_set(records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    losses = {record["step"]: float(loss) for record in records if _is_number(loss := held_out_loss(record, name))}
    return sorted(losses.items())


def _datasets(record: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    given = record.get("datasets")
    parts = {name: part for name, part in given.items() if _is_dict(part)} if _is_dict(given) else {}
    return {
        name: (samples, epochs)
        for name, part in parts.items()
        if _is_number(samples := part.get("samples")) and _is_number(epochs := part.get("epochs"))
    }


def _measures(records: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Measures by step; omits values that are not numbers, and steps without any."""
    found: dict[int, dict[str, float]] = {}
    for record in records:
        given = record.get("valid")
        means = {name: float(mean) for name, mean in given.items() if _is_number(mean)} if _is_dict(given) else {}
        if means:
            found[record["step"]] = means
    return found


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _expert_loads(record: Mapping[str, Any]) -> dict[int, LayerLoads]:
    """The expert loads of each layer in ``record``, without layers whose load is not a list of numbers."""
    experts = record.get("experts")
    layers = experts.get("layers") if isinstance(experts, dict) else None
    found = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    return {
        layer["layer"]: _layer_loads(layer)
        for layer in found
        if type(layer.get("layer")) is int and _is_list_of_numbers(layer.get("load"))
    }


def _layer_loads(layer: Mapping[str, Any]) -> LayerLoads:
    means, least, violation = [float(load) for load in layer["load"]], layer.get("least"), layer.get("max_violation")
    return LayerLoads(
        means,
        [float(load) for load in least] if _is_list_of_numbers(least) and len(least) == len(means) else None,
        float(violation) + 1.0 if _is_number(violation) else max(means),
    )


def _names(value: object) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else []


def _is_list_of_numbers(value: object) -> TypeGuard[list[float]]:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _samples(folder: Path, records: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    on_the_way = (record["samples"] for record in reversed(records) if isinstance(record.get("samples"), list))
    found: list[Any] = _json(folder / "samples.json", list) or next(on_the_way, [])
    return [sample for sample in found if isinstance(sample, dict)]


def _phases(training: list[dict[str, Any]]) -> list[Phase]:
    phases = []
    for layout, run in groupby(_with_num_steps(training), lambda pair: str(pair[1].get("layout", ""))):
        group = list(run)
        records = [record for _, record in group]
        times = [spans for record in records if (spans := _spans(record, "time"))]
        names = dict.fromkeys(name for time in times for name in time if name != COMPILE)
        medians = {name: _median([time.get(name, 0.0) for time in times]) for name in names}
        phases.append(
            Phase(
                layout=layout,
                first_step=min(records[0]["step"] - group[0][0] + 1, records[0]["step"]),
                last_step=records[-1]["step"],
                step_seconds=_median([seconds for record in records if (seconds := _work_seconds(record)) > 0]),
                time={name: seconds for name, seconds in medians.items() if seconds > 0},
            )
        )
    return phases


def _time(records: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the whole run, by kind of work."""
    steps = sorted((record for record in records if "loss" in record), key=lambda record: record["step"])
    trained = [num_steps * _work_seconds(record) for num_steps, record in _with_num_steps(steps)]
    found = {"training": math.fsum(seconds for seconds in trained if seconds > 0)}
    for record in records:
        own, between = _spans(record, "time"), _spans(record, "between")
        if "loss" in record:  # its other spans are included in the step
            own = {COMPILE: own[COMPILE]} if COMPILE in own else {}
        for name, seconds in [*own.items(), *between.items()]:
            found[name] = found.get(name, 0.0) + seconds
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _joules(records: list[dict[str, Any]]) -> float:
    measured = [record["energy"].get("joules") for record in records if _is_dict(record.get("energy"))]
    return math.fsum(joules for joules in measured if _is_number(joules))


def _with_num_steps(training: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each record with the number of steps that it represents: those since the previous record."""
    return [(after["step"] - before["step"], after) for before, after in pairwise([{"step": 0}, *training])]


def _work_seconds(record: Mapping[str, Any]) -> float:
    """Step time without compile time; NaN if it was not recorded."""
    seconds = record.get("step_seconds")
    return float(seconds) - _spans(record, "time").get(COMPILE, 0.0) if _is_number(seconds) else math.nan


def _spans(record: Mapping[str, Any], field: str) -> dict[str, float]:
    """Seconds by outermost span."""
    time = record.get(field)
    spans = time.items() if isinstance(time, dict) else ()
    return {name: float(seconds) for name, seconds in spans if "/" not in name and _is_number(seconds)}


def _median(values: Sequence[float]) -> float:
    return float(median(values)) if values else math.nan


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json(path: Path, kind: type) -> Any:
    """The content of ``path``, of type ``kind``; empty if there is no file."""
    if not path.is_file():
        return kind()
    try:
        content = json.loads(read_regular_file(path, _MOST_BYTES).decode("utf-8"), parse_int=float_sized)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} must be JSON; it cannot be read ({error}); remove it to omit that part of the report"
        ) from error
    if not isinstance(content, kind):
        wanted = "an object" if kind is dict else "a list"
        raise DataError(f"{path} must contain {wanted}; got {content!r:.60}; remove it to omit that part of the report")
    return content
