"""On a GPU, torch's kernels take fewer calls than on a CPU: tests of the path "aten" skip the others."""

from collections.abc import Generator

import pytest
import torch

from megalith.errors import BackendError
from megalith.fusions.core import kept_code

ON_GPU = torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Skips a test with the parameter "aten" whose call is refused; the message says what the path takes."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    try:
        yield
    except BackendError as error:
        if ON_GPU and "aten" in parameters and "backend='aten'" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def new_folder(tmp_path, monkeypatch):
    """An empty folder for compiled formulas."""
    folder = tmp_path / "formulas"
    folder.mkdir()
    monkeypatch.setattr(kept_code, "_folder", lambda: folder)
    return folder
