"""Errors that Megalith raises deliberately: invalid input, or a condition that a message can explain.

MegalithError
├── ConfigError (ValueError)
│   └── ExperimentalError
├── ShapeError (ValueError)
├── BackendError (ValueError)
├── TopologyError (ValueError)
├── DataError (ValueError)
├── CheckpointError (ValueError)
├── StorageError (OSError)
│   └── MissingFileError (FileNotFoundError)
├── MissingDependencyError (ImportError)
├── DemoError (RuntimeError), in insight/demo.py
├── NonFiniteError (FloatingPointError)
└── RankFailedError (RuntimeError)

Each is also a subclass of the built-in in parentheses, so that ``except`` clauses that know nothing of Megalith catch
it. Messages say what was expected, what was given, and how to fix it. The command line prints only the message and
exits with code 2, or with 1 for the last two, which are not caused by the input.

Plain built-ins are raised for programming errors of the caller (an index out of range, a write to frozen settings), in
validators from which pydantic collects them, and by libraries. One that reaches the command line is unexpected: it
keeps its traceback, and the exit code is 1.
"""

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExperimentalError",
    "MegalithError",
    "MissingDependencyError",
    "MissingFileError",
    "NonFiniteError",
    "RankFailedError",
    "ShapeError",
    "StorageError",
    "TopologyError",
]


class MegalithError(Exception):
    """Base class of all expected errors; subclasses can be built from a message alone, to be sent between ranks.

    ``on_every_rank``: every rank raises this error with the same message, so that only one reports it. Set by
    ``megalith.topology.agreement``.
    """

    on_every_rank: bool = False


class ConfigError(MegalithError, ValueError):
    """Settings are unknown, contradict each other, or have no effect."""


class ExperimentalError(ConfigError):
    """An experimental feature is used without being enabled by name."""


class ShapeError(MegalithError, ValueError):
    """The shape, dtype or device of a tensor does not fit."""


class BackendError(MegalithError, ValueError):
    """A path of a fused operation cannot run on these tensors or on this machine."""


class TopologyError(MegalithError, ValueError):
    """The axes of a layout do not fit the number of ranks, or a group does not exist."""


class DataError(MegalithError, ValueError):
    """A dataset or tokenizer is missing, damaged, or not the expected one."""


class CheckpointError(MegalithError, ValueError):
    """A checkpoint is incomplete, damaged, or of a different model."""


class StorageError(MegalithError, OSError):
    """A folder or disk cannot be read or written."""


class MissingFileError(StorageError, FileNotFoundError):
    """A file or folder does not exist."""


class MissingDependencyError(MegalithError, ImportError):
    """An optional package is required but not installed."""


class NonFiniteError(MegalithError, FloatingPointError):
    """A loss or gradient is NaN or infinite, and the run is configured to stop in that case."""


class RankFailedError(MegalithError, RuntimeError):
    """Another rank had an unexpected error; its traceback is on that rank's output."""
