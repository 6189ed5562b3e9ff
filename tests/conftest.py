"""Runs Triton kernels without a GPU, poisons fresh memory, resets signal handlers, makes every test deterministic."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when megalith or triton is imported, so set before
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required for deterministic matmuls on a GPU
for number in (signal.SIGINT, signal.SIGHUP):  # ignored, and so inherited, under nohup and in background jobs
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)
settings.register_profile("no deadline", deadline=None)  # the default, 200 ms per example, fails on a busy machine
settings.load_profile("no deadline")
torch.set_num_threads(1)  # tensors are small, and threads that share a busy core wait 8 ms for each other


def pytest_configure(config: pytest.Config) -> None:
    """On a GPU, warnings are shown but are not errors: libraries there emit warnings that we do not cause."""
    if ON_GPU:
        config.addinivalue_line("filterwarnings", "default")  # the last matching filter wins


@pytest.fixture(autouse=True)
def poisoned_memory():
    """``torch.empty`` and its variants return NaN, so that output nobody writes fails its test reliably.

    On a GPU, nondeterministic torch kernels only warn, because some have no deterministic alternative.
    """
    torch.use_deterministic_algorithms(True, warn_only=ON_GPU)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def on_device(device: str) -> Iterator[None]:
    """In the test, new tensors are on ``device`` unless told otherwise."""
    with torch.device(device):
        yield
