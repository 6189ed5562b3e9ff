"""The only place that knows optional packages: which are installed, and how to install the others."""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

from megalith.errors import MissingDependencyError

__all__ = ["has", "has_triton", "missing", "need", "triton_interprets", "why_not_interpret"]

# package: (what needs it, the extra of megalith that installs it, or None if pip cannot install it)
_EXTRAS: dict[str, tuple[str, str | None]] = {
    "pyarrow.parquet": ("reading .parquet files", "parquet"),
    "matplotlib": ("drawing report.html", "report"),
    "matplotlib.figure": ("drawing report.html", "report"),
    "torch.utils.tensorboard": ("writing TensorBoard files", "tracking"),
    "wandb": ("logging to Weights & Biases", "tracking"),
    "mlflow": ("logging to MLflow", "tracking"),
    "pynvml": ("measuring the energy of an NVIDIA GPU", "energy"),
    "transformers": ("comparing with Hugging Face", "hf"),
    "safetensors.torch": ("comparing with Hugging Face", "hf"),
    "megatron.core": ("comparing with Megatron-Core", "dev"),
    "deep_ep": ("parallel.dispatch.method=flex", None),
    "triton": ("a Triton kernel", "triton"),
    "lm_eval.api.model": ("evaluating with lm-eval", "lm-eval"),
}

# Read once: a kernel is compiled or interpreted from its definition on, and torch.compile can trace only a constant.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_TRITON_INTERPRETS = _HAS_TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def has(package: str) -> bool:
    """Returns whether ``package``, one of this module's table, is installed; does not import it."""
    return package in _EXTRAS and importlib.util.find_spec(_root(package)) is not None


def need(package: str) -> ModuleType:
    """Imports and returns the module ``package``. Raises MissingDependencyError with the command that installs it."""
    purpose, extra = _EXTRAS[package]
    how = (
        f"run: pip install 'megalith[{extra}]'"
        if extra
        else "build it from source, as its documentation describes: it has no wheels"
    )
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{purpose} needs {package}, which cannot be imported ({error}); {how}") from error


def missing() -> Iterator[tuple[str, str, str]]:
    """Yields (package, what needs it, extra that installs it) for every extra's package that is not installed."""
    found = {
        _root(package): (purpose, extra)
        for package, (purpose, extra) in _EXTRAS.items()
        if extra is not None and extra != "dev" and not has(package)
    }
    for package, (purpose, extra) in found.items():
        yield package, purpose, extra


def _root(package: str) -> str:
    """Returns the name that pip knows a module's package by."""
    # torch includes the writer, which needs the package
    return "tensorboard" if package == "torch.utils.tensorboard" else package.partition(".")[0]


def has_triton() -> bool:
    """Returns whether ``triton`` is installed; does not import it."""
    return _HAS_TRITON


def triton_interprets() -> bool:
    """Returns whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` at import), even on CPU."""
    return _TRITON_INTERPRETS


def why_not_interpret() -> str | None:
    """Returns why Triton's interpreter cannot run kernels here, in one clause; None if it could when enabled."""
    if not _HAS_TRITON:
        return "triton is not installed (pip install 'megalith[triton]')"
    major, minor, *_ = importlib.metadata.version("numpy").split(".")
    if (int(major), int(minor)) >= (2, 4):
        return f"Triton's interpreter needs numpy below 2.4; {major}.{minor} is installed"
    return None
