"""``RUN/about.json``: what the run is, for people and for its report."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from megalith.observe.machine import describe_machine
from megalith.storage.atomic import write_json_atomic
from megalith.training.run import Run

__all__ = ["write_about"]

_NAME = "about.json"


def write_about(run: Run, origin: Mapping[str, str]) -> None:
    """Size, preset, dtype, when it first started, ``origin`` (recipe and command), versions and the machine.

    Raises:
        StorageError: the folder does not take the file.
    """
    about: dict[str, object] = {
        "parameters": run.task.num_parameters,
        **({"model": run.config.model.preset} if run.config.model.preset else {}),
        "dtype": run.config.precision.dtype,
        "started": _first_start(run) or f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    write_json_atomic(run.folder / _NAME, about | dict(origin) | describe_machine())


def _first_start(run: Run) -> object:
    """When a run that goes on was started first, if that can still be read."""
    if run.state.step == 0:
        return None
    try:
        return json.loads((run.folder / _NAME).read_text(encoding="utf-8")).get("started")
    except (OSError, ValueError, AttributeError):
        return None
