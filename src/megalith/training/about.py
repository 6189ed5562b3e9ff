"""``RUN/about.json``: describes the run, for people and for its report."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from megalith.observe.machine import describe_machine
from megalith.storage.atomic import write_json_atomic
from megalith.training.run import Run

__all__ = ["recorded", "write_about"]

_NAME = "about.json"


def write_about(run: Run, origin: Mapping[str, str]) -> None:
    """Writes size, preset, dtype, what the loss is a mean over, time of the first start, ``origin``, versions, machine.

    ``origin``: the recipe and the command.

    Raises:
        StorageError: the file cannot be written.
    """
    first_start = recorded(run.folder, "started") if run.state.step else None
    about: dict[str, object] = {
        "parameters": run.task.num_parameters,
        **({"model": run.config.model.preset} if run.config.model.preset else {}),
        "dtype": run.config.precision.dtype,
        "loss_over": run.task.counted,
        "started": first_start or f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    write_json_atomic(run.folder / _NAME, about | dict(origin) | describe_machine())


def recorded(run_folder: Path, name: str) -> object:
    """Returns what an earlier start recorded under ``name``; None if that can no longer be read."""
    try:
        return json.loads((run_folder / _NAME).read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None
