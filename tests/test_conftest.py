"""On a GPU, warnings and non-deterministic kernels do not fail the suite, as they do elsewhere."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
import torch
torch.cuda.is_available = lambda: True
from tests.conftest import poisoned_memory, pytest_configure
"""
TESTS = """
import warnings
import torch

def test_of_a_warning():
    warnings.warn("of a library", UserWarning)

def test_of_determinism():
    assert torch.empty(3).isnan().all()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
"""


def test_on_a_gpu_warnings_and_what_is_not_deterministic_are_shown(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(TESTS)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert "2 passed, 1 warning in" in found, found
    assert "UserWarning: of a library" in found
