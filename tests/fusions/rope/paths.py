"""The paths of rope, and a mark that runs a test on each of them, on the GPU if there is one."""

from typing import Any

import pytest

PATHS = ["triton", "blocked", "reference"]
on_device = pytest.mark.usefixtures("on_device")


def on_paths(test: Any) -> Any:
    """Runs a test on each path, and on the GPU if there is one."""
    return on_device(pytest.mark.parametrize("backend", PATHS)(test))
