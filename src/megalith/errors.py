"""Every error raised on purpose. Each also is the built-in that an older ``except`` clause expects.

MegalithError
├── ConfigError (ValueError)
│   └── ExperimentalError
├── ShapeError (ValueError)
├── BackendError (ValueError)
├── TopologyError (ValueError)
├── DataError (ValueError)
├── CheckpointError (ValueError)
├── StorageError (OSError)
├── MissingDependencyError (ImportError)
└── NonFiniteError (FloatingPointError)

Messages say what was wanted, what was given, and the way out. The command line turns every one of them but
NonFiniteError, which is no fault of the input, into exit code 2.
"""

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExperimentalError",
    "MegalithError",
    "MissingDependencyError",
    "NonFiniteError",
    "ShapeError",
    "StorageError",
    "TopologyError",
]


class MegalithError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(MegalithError, ValueError):
    """Settings that are unknown, contradict each other, or have no effect."""


class ExperimentalError(ConfigError):
    """An experimental feature is used without its name in the switch."""


class ShapeError(MegalithError, ValueError):
    """A tensor whose shape, dtype or device does not fit."""


class BackendError(MegalithError, ValueError):
    """A path of a fused operation that cannot run on these tensors, or here."""


class TopologyError(MegalithError, ValueError):
    """Axes of a layout that do not fit the number of ranks, or a group that does not exist."""


class DataError(MegalithError, ValueError):
    """A dataset or tokenizer that is missing, damaged, or of another making."""


class CheckpointError(MegalithError, ValueError):
    """A checkpoint that is incomplete, damaged, or of another model."""


class StorageError(MegalithError, OSError):
    """A folder or disk that cannot take what must be written."""


class MissingDependencyError(MegalithError, ImportError):
    """An optional package is needed for what was asked."""


class NonFiniteError(MegalithError, FloatingPointError):
    """A loss or gradient is NaN or infinite, and the run was told to stop at that."""
