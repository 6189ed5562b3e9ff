"""The errors that are foreseen: wrong input, or a state of the world that a message can explain.

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

Each also is the built-in in brackets, so that an ``except`` clause that knows no Megalith catches it. Messages say what
was wanted, what was given, and the way out. The command line prints the message alone and ends with exit code 2, or
with 1 for the last two, which are no fault of the input.

Plain built-ins are raised for slips of the caller (an index out of range, a write to frozen settings), in validators
from which pydantic collects them, and by libraries. One that reaches the command line was not foreseen: it keeps its
traceback, and the exit code is 1.
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
    """Base of all foreseen errors; a subclass can be made from its message alone, so that it can travel between ranks.

    ``on_every_rank``: every rank raises this error with the same message, so that one of them reports it for all.
    ``megalith.topology.agreement`` sets it.
    """

    on_every_rank: bool = False


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
    """A folder or disk that cannot be read, or cannot take what must be written."""


class MissingFileError(StorageError, FileNotFoundError):
    """A file or folder that is not there."""


class MissingDependencyError(MegalithError, ImportError):
    """An optional package is needed for what was asked."""


class NonFiniteError(MegalithError, FloatingPointError):
    """A loss or gradient is NaN or infinite, and the run was told to stop at that."""


class RankFailedError(MegalithError, RuntimeError):
    """Another rank has an error that was not foreseen; its traceback is on that rank's output."""
