"""The path that ``use`` says, for the thread or the asyncio task that says it.

``preference.backend`` reads it: torch.compile guards an attribute of a module, and cannot trace a ContextVar.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import get_args

from megalith.errors import BackendError
from megalith.fusions.paths.names import Backend

__all__ = ["use"]

_backend: ContextVar[Backend | None] = ContextVar("backend", default=None)


def __getattr__(name: str) -> Backend | None:
    if name == "backend":
        return _backend.get()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def use(backend: Backend | None) -> Iterator[None]:
    """Fused operations that this thread or asyncio task calls inside take ``backend`` where they can.

    An operation that has no such path, or whose operand does not fit it, takes its default; ``explain()`` says which.
    The backward of an operation follows its forward, wherever it runs. With None all take their defaults. torch.compile
    follows it from outside of what it traces, not inside.

    Raises:
        BackendError: there is no such path.
    """
    if backend is not None and backend not in get_args(Backend):
        raise BackendError(f"backend must be one of {', '.join(get_args(Backend))}, or None; got {backend!r}")
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)
