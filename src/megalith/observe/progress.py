"""The progress line of a training run."""

import math
import re
from collections.abc import Mapping
from typing import Any

from megalith.observe.metrics import COMPILE
from megalith.observe.units import duration, gibibytes, quantity

__all__ = ["progress_line", "shortened"]

# columns to drop in a narrow terminal, in this order
_LEAST_WANTED = (r"  max violation +\S+", r"  grad norm +\S+", r"  lr +\S+", r"  +\d+%", r"  +\S+ tokens/s")


def progress_line(record: Mapping[str, Any], steps: int, seconds_left: float) -> str:
    """Formats a step's ``record`` (metrics.py) in fixed columns, so that the lines of a log file are aligned.

    ``step 120/1,200  10%  loss  3.4121  grad norm  0.92  lr 3.00e-04  12.3k tokens/s  3.21 GiB  4 min 10 s left``

    A loss may be negative, and one that is not finite is shown as ``nan`` or ``inf``. The time left is omitted if
    ``seconds_left`` is not finite (nothing measured yet). Compile time and experts add columns.
    """
    step, total = record["step"], f"{steps:,}"
    columns = [
        f"step {step:>{len(total)},}/{total}",
        f"{step / steps:4.0%}" if steps else "    ",
        f"loss {record['loss']:7.4f}",
        f"grad norm {record['grad_norm']:5.2f}",
        f"lr {record['lr']:.2e}",
        f"{quantity(record['tokens_per_second']):>5} tokens/s",
        f"{gibibytes(record['peak_memory']):>8}",
    ]
    if experts := record.get("experts"):
        columns.append(f"max violation {experts['max_violation']:5.2f}")
    if math.isfinite(seconds_left):
        columns.append(f"{duration(seconds_left)} left")
    if compiling := record["time"].get(COMPILE):
        columns.append(f"({duration(compiling)} compiling)")
    return "  ".join(columns)


def shortened(line: str, width: int) -> str:
    """Shortens a progress line to ``width`` characters by dropping columns, as far as that is possible."""
    for column in _LEAST_WANTED:
        if len(line) > width:
            line = re.sub(column, "", line, count=1)
    return line
