"""The one place that knows optional packages: which are there, and how to get one that is not."""

import importlib
import importlib.util
from types import ModuleType

from megalith.errors import MissingDependencyError

__all__ = ["has", "need"]

# package: (what needs it, the extra of megalith that installs it)
_EXTRAS = {
    "pyarrow.parquet": ("reading .parquet files", "parquet"),
    "matplotlib": ("drawing report.html", "report"),
    "matplotlib.figure": ("drawing report.html", "report"),
    "torch.utils.tensorboard": ("writing TensorBoard files", "tracking"),
    "transformers": ("comparing with Hugging Face", "hf"),
}


def has(package: str) -> bool:
    """Whether ``package`` (one of this module's table) is installed; does not import it."""
    # torch carries the writer, and the writer needs the package
    root = "tensorboard" if package == "torch.utils.tensorboard" else package.partition(".")[0]
    return package in _EXTRAS and importlib.util.find_spec(root) is not None


def need(package: str) -> ModuleType:
    """The module ``package``, imported. Raises MissingDependencyError, with the command that installs it."""
    purpose, extra = _EXTRAS[package]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs {package}, which cannot be imported ({error}); run: pip install 'megalith[{extra}]'"
        ) from error
