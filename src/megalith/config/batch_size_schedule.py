"""The step schedule of the global batch size, written as ``"0:16 10K:32 1M:64"``: a batch size from each threshold on.

Thresholds count consumed samples, or consumed tokens when a sequence length is given, with K, M, B and T for 1e3, 1e6,
1e9 and 1e12. The notation is Megatron's ``--step-batch-size-schedule``.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from megalith.errors import ConfigError

__all__ = ["BatchSizeStage", "mend_batch_size_schedule", "parse_batch_size_schedule", "with_batch_sizes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STAGE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?):(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class BatchSizeStage:
    """From ``first_sample`` consumed samples on, until the next stage begins, a step takes ``global_batch_size``."""

    first_sample: int
    global_batch_size: int


def parse_batch_size_schedule(text: str, *, seq_length: int | None = None) -> tuple[BatchSizeStage, ...]:
    """The stages of ``text``, in samples.

    Args:
        text: stages separated by spaces, each ``threshold:batch``; thresholds start at 0 and increase.
        seq_length: tokens in a sample, if thresholds count tokens; they are rounded down to whole samples.

    Raises:
        ConfigError: a stage that cannot be read, a first threshold other than 0, thresholds that do not increase (two
            token thresholds inside one sample among them), or a batch of 0.
    """
    stages = []
    for entry in text.split():
        threshold, batch = _read(entry)
        stages.append(BatchSizeStage(threshold // (seq_length or 1), batch))
    if not stages or stages[0].first_sample != 0:
        raise ConfigError(f"a batch size schedule must begin at threshold 0, such as '0:16 10K:32'; got {text!r}")
    for earlier, later in pairwise(stages):
        if later.first_sample <= earlier.first_sample:
            unit = "" if seq_length is None else "samples "
            raise ConfigError(
                f"thresholds of a batch size schedule must increase; got {unit}{earlier.first_sample} and then "
                f"{later.first_sample} in {text!r}"
            )
    return tuple(stages)


def with_batch_sizes(text: str, sizes: list[int]) -> str:
    """``text`` with its thresholds as written and these batch sizes, one per stage."""
    return " ".join(f"{entry.partition(':')[0]}:{size}" for entry, size in zip(text.split(), sizes, strict=True))


def mend_batch_size_schedule(text: str, *, seq_length: int | None = None) -> str | None:
    """Returns a valid schedule near to ``text``: its readable stages, sorted, from 0 on. None if it has none."""
    stages: dict[int, str] = {}
    for entry in re.split(r"[\s,;]+", text.upper().replace("=", ":")):
        try:
            threshold, _ = _read(entry)
        except ConfigError:
            continue
        stages.setdefault(threshold // (seq_length or 1), entry)
    if not stages:
        return None
    first, *rest = (stages[threshold] for threshold in sorted(stages))
    return " ".join([f"0:{first.partition(':')[2]}", *rest])


def _read(entry: str) -> tuple[int, int]:
    """Returns the threshold and batch size of one stage."""
    if not (match := _STAGE.fullmatch(entry)):
        raise ConfigError(f"a stage of a batch size schedule must look like 10K:32 (threshold:batch); got {entry!r}")
    number, unit, batch = match.groups()
    threshold = Fraction(number) * _UNITS[unit]
    if threshold.denominator != 1:
        raise ConfigError(f"thresholds of a batch size schedule must be integers; got {entry!r}")
    if int(batch) < 1:
        raise ConfigError(f"batch sizes of a schedule must be at least 1; got {entry!r}")
    return int(threshold), int(batch)
