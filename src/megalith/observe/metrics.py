"""The metrics of a run: one JSON object per line in ``RUN/metrics.jsonl``.

Each step is a record with: step, loss (nats per token), grad_norm (before clipping), lr, tokens and consumed_samples
(read so far, including tokens without a loss), step_seconds (of this step, including waits for data and the compiler),
tokens_per_second and mfu or null (both without compile time), layout ("tp2 dp1"), skipped (the weights were not
updated), peak_memory (bytes, of rank 0, so far), time ({span: seconds in this step}, with ``compile`` if there was a
wait for torch.compile), and after a checkpoint ``between`` ({span: seconds between the last step and this one}). In
float16 there is also loss_scale, and for a loss with several terms ``terms`` ({term: mean}).

An evaluation is a separate record: step, valid_loss, valid_tokens, time, and ``valid`` ({term or measure: mean}) if
there are several. For a classifier it also has ``classes``, the class names; ``valid`` refers to them by index, as
confusion/TRUE/TAKEN, and has no such number for a class without texts. With named validation sets these are the numbers
of the first set, and ``valid_sets`` has those of each: {name: {"loss", "perplexity", "tokens"}}, and ``means`` in the
format of ``valid``. The texts of ``train.generation`` are a record as well: step, time, samples ([{"prompt", "text"},
...]).

With several training datasets, the records of every ``train.log_every``-th step and of the first and last step have
``datasets``: {name: {"samples": read from it so far, "epochs": how often that is all of it}}.

With experts, the records of every ``train.log_every``-th step and of the first and last step have ``experts``:
max_violation (maximum expert load divided by the mean, minus 1), entropy (of the choices, nats) and dead_experts
(chosen by no token), each of the layer with the worst value; each balance loss by name (unweighted, mean over layers);
bias_range (the widest); and ``layers``, with the same for each layer: [{"layer", "max_violation", "entropy",
"dead_experts", "losses": {name: value or null}, "bias_range" or null, "load"}, ...]. ``load`` is the load of each
expert relative to the mean. With more than 64 experts it is the mean of each of 64 ranges of adjacent experts, and
``least`` is the smallest load in each range, 0 if it has a dead expert.

With ``train.log_energy``, the same records and those before a checkpoint have ``energy``, of the steps since the last
such record, on all devices together: tokens, joules, counters (how many energy counters were read), and watts (the mean
power) and tokens_per_joule, or missing_counters if some could not be read throughout. If a run is stopped in between,
its last steps have a record of ``step`` and ``energy`` alone.

JSON has no NaN. A number that is not finite is stored as null, and ``nonfinite`` in the same object has its value:
``{"step": 7, "loss": null, "nonfinite": {"loss": "nan"}}``. ``read_metrics`` restores these numbers.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, TypeGuard

from megalith.errors import DataError
from megalith.storage.atomic import publish_file
from megalith.storage.failures import explained
from megalith.storage.json_fields import float_sized

__all__ = ["COMPILE", "MetricsWriter", "held_out_loss", "read_metrics"]

COMPILE = "compile"  # the span of waiting for torch.compile, not included in any other span

_NAME = "metrics.jsonl"
_NONFINITE = "nonfinite"
_SETS = "valid_sets"
_LONGEST_LINE = 1 << 24  # bytes; texts of train.generation are the longest that training writes


class MetricsWriter:
    """Appends records to ``RUN/metrics.jsonl``; used on one rank.

    A run that resumes at ``resumed_step`` repeats the later steps, so their records are dropped, and so is a last line
    that a crash truncated. If the process is killed, no earlier record is lost.

    Raises:
        DataError: a line other than the last is not a record.
        StorageError: the file cannot be written.
    """

    def __init__(self, run_folder: Path, *, resumed_step: int) -> None:
        self._path = Path(run_folder) / _NAME
        with explained("write", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_after(self._path, resumed_step)
            self._file = self._path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``, which has a ``step``; the operating system has it when this returns."""
        assert isinstance(record.get("step"), int), f"a record must have an integer step; got {record.get('step')!r}"
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        with explained("write", self._path):
            while line:  # when the disk fills up, a write may be partial before the next one fails
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file; nothing can be written afterwards."""
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Returns all records of a run, in the order written; ignores a truncated last line.

    Raises DataError if there is no metrics.jsonl, or if a line other than the last is not a record.
    """
    path = Path(run_folder) / _NAME
    if not path.is_file():
        raise DataError(
            f"{run_folder} has no {_NAME}, so it is not the folder of a run; give the folder that training got as run="
        )
    return [_restored(record) for _, record in _records(path)]


def held_out_loss(record: Mapping[str, Any], set_name: str) -> float | None:
    """The loss of a validation set in ``record``, or None; ``set_name`` is "" for an unnamed set."""
    sets = record.get(_SETS)
    if not set_name:
        return record.get("valid_loss") if sets is None else None  # with named sets it belongs to the first of them
    loss: float | None = (sets or {}).get(set_name, {}).get("loss")
    return loss


def _drop_after(path: Path, last_step: int) -> None:
    """Keep only complete records of steps up to ``last_step`` in ``path``."""
    if not path.exists():
        return
    kept = b"".join(line + b"\n" for line, record in _records(path) if record["step"] <= last_step)
    if kept != path.read_bytes():
        with publish_file(path) as temporary:
            temporary.write_bytes(kept)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each record with its line."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), start=1):
            try:
                record = json.loads(line, parse_int=float_sized)
            except (ValueError, RecursionError):  # including UnicodeDecodeError
                record = None
            if _is_record(record):
                yield line.removesuffix(b"\n"), record
            elif line.endswith(b"\n") or len(line) == _LONGEST_LINE:  # otherwise a crash truncated the last line
                raise DataError(
                    f"every line of {path} must be a JSON object with a step and numbers as training writes them; "
                    f"line {number} is {line[:60]!r}; remove that line, or move the file away"
                )


def _is_record(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether ``value`` is an object with a step, and fields that are read without further checks have valid types."""
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return False
    sets = value.get(_SETS, {})
    if not isinstance(sets, dict) or not all(isinstance(numbers, dict) for numbers in sets.values()):
        return False
    losses = [value.get("valid_loss"), *(numbers.get("loss") for numbers in sets.values())]
    return all(type(loss) in (int, float, NoneType) for loss in losses) and _is_restorable(value)


def _is_restorable(record: dict[str, Any]) -> bool:
    """Whether ``_restored`` can read ``record`` and the objects in it."""
    nonfinite = record.get(_NONFINITE, {})
    if not isinstance(nonfinite, dict) or not all(value in ("nan", "inf", "-inf") for value in nonfinite.values()):
        return False
    return all(
        _is_restorable(value) for name, value in record.items() if name != _NONFINITE and isinstance(value, dict)
    )


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` in the form that JSON can represent."""
    result: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            result[name] = _finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            result[name], nonfinite[name] = None, str(value)
        else:
            result[name] = value
    return {**result, _NONFINITE: nonfinite} if nonfinite else result


def _restored(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` as it was before ``_finite``."""
    nonfinite = {name: float(value) for name, value in record.pop(_NONFINITE, {}).items()}
    nested = {name: _restored(value) for name, value in record.items() if isinstance(value, dict)}
    return {**record, **nested, **nonfinite}
