"""What a run has left in its folder, read and summed up.

metrics.jsonl      training records and evaluations (observe/metrics.py); the one part that must be there
evaluation.json    {"valid_loss", "unigram_loss", "bigram_loss"}, nats per token of held-out text
samples.json       [{"prompt", "text"}, ...]
about.json         {"parameters": count, and whatever is worth knowing: versions, the machine, the dtype}
config.yaml        the resolved settings
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeGuard

from megalith.errors import DataError
from megalith.observe.metrics import read_metrics

__all__ = ["Phase", "RunHistory", "read_run"]


@dataclass(frozen=True)
class Phase:
    """Steps in a row under one layout."""

    layout: str
    first_step: int
    last_step: int
    step_seconds: float  # mean; NaN where it was not recorded
    time: Mapping[str, float]  # mean seconds per step by span, outermost spans only


@dataclass(frozen=True)
class RunHistory:
    """A run's records, in order of steps, and the files beside them; what is missing is empty."""

    name: str
    training: list[dict[str, Any]]
    evaluations: list[tuple[int, float]]  # (step, held-out loss)
    phases: list[Phase]
    evaluation: Mapping[str, Any]
    samples: list[Mapping[str, Any]]
    about: Mapping[str, Any]
    settings: str

    def column(self, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of the training records that hold a number under ``field``."""
        found = [(record["step"], float(record[field])) for record in self.training if _is_number(record.get(field))]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, field: str) -> float | None:
        """The newest number under ``field``, or None."""
        values = self.column(field)[1]
        return values[-1] if values else None

    @property
    def seconds(self) -> float:
        """Time spent in steps; work that a crash undid is not in it. NaN where no step was timed."""
        timed = [p.step_seconds * (p.last_step - p.first_step + 1) for p in self.phases if p.step_seconds > 0]
        return math.fsum(timed) if timed else math.nan

    @property
    def valid_loss(self) -> float | None:
        """The final held-out loss: of evaluation.json, or else of the last evaluation during training."""
        loss = self.evaluation.get("valid_loss")
        if _is_number(loss):
            return float(loss)
        return self.evaluations[-1][1] if self.evaluations else None


def read_run(folder: Path) -> RunHistory:
    """Read ``folder``. Raises DataError without a training record, or when a file beside the metrics is damaged."""
    records = read_metrics(folder)
    training = sorted((record for record in records if "loss" in record), key=lambda record: record["step"])
    if not training:
        raise DataError(
            f"{folder / 'metrics.jsonl'} should hold a record of at least one training step, and holds none; "
            "train past train.log_every steps first"
        )
    evaluations = {record["step"]: float(loss) for record in records if _is_number(loss := record.get("valid_loss"))}
    settings = folder / "config.yaml"
    return RunHistory(
        name=folder.resolve().name,
        training=training,
        evaluations=sorted(evaluations.items()),
        phases=_phases(training),
        evaluation=_json(folder / "evaluation.json", dict),
        samples=[sample for sample in _json(folder / "samples.json", list) if isinstance(sample, dict)],
        about=_json(folder / "about.json", dict),
        settings=settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else "",
    )


def _phases(training: list[dict[str, Any]]) -> list[Phase]:
    # a record stands for the steps since the one before it
    steps = [b["step"] - a["step"] for a, b in pairwise([{"step": 0}, *training])]
    phases = []
    for layout, run in groupby(zip(steps, training, strict=True), lambda pair: str(pair[1].get("layout", ""))):
        group = list(run)
        times = [(count, record["time"]) for count, record in group if isinstance(record.get("time"), dict)]
        names = dict.fromkeys(name for _, time in times for name in time if "/" not in name)
        first = group[0][1]["step"] - group[0][0] + 1
        phases.append(
            Phase(
                layout=layout,
                first_step=min(first, group[0][1]["step"]),
                last_step=group[-1][1]["step"],
                step_seconds=_mean([(n, record.get("step_seconds")) for n, record in group]),
                time={name: mean for name in names if (mean := _mean([(n, t.get(name, 0.0)) for n, t in times])) > 0},
            )
        )
    return phases


def _mean(weighted: list[tuple[int, Any]]) -> float:
    """The mean of the numbers among (weight, value), NaN when there is none."""
    numbers = [(weight, value) for weight, value in weighted if _is_number(value) and weight > 0]
    total = sum(weight for weight, _ in numbers)
    return math.fsum(weight * value for weight, value in numbers) / total if total else math.nan


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json(path: Path, kind: type) -> Any:
    """The content of ``path``, of type ``kind``; an empty one where there is no file."""
    if not path.is_file():
        return kind()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} should be JSON, and is not ({error}); remove it to leave that part out") from error
    if not isinstance(content, kind):
        wanted = "an object" if kind is dict else "a list"
        raise DataError(f"{path} should hold {wanted}; it holds {content!r:.60}; remove it to leave that part out")
    return content
