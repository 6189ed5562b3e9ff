"""Path preferences: ``use`` applies to the current thread or asyncio task, the others to the whole process.

``preference.backend`` reads the value set by ``use``: torch.compile can guard a module attribute, but cannot trace a
ContextVar.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import get_args

from megalith.errors import BackendError
from megalith.fusions.core.names import Backend

__all__ = ["prefer", "ranking", "use", "without_compiling"]

_backend: ContextVar[Backend | None] = ContextVar("backend", default=None)


class _Preference:
    """The paths given to one ``prefer``, and the path that each operation has taken since."""

    def __init__(self, backends: tuple[Backend, ...]) -> None:
        self.backends = backends
        self.taken = set[tuple[str, Backend]]()


class _Ranking:
    """The state of ``prefer`` and ``without_compiling``; contexts of several threads may exit in any order.

    Attributes:
        compiles: False inside any ``without_compiling`` context.
        preference: that of the most recently entered ``prefer`` context still active.
    """

    def __init__(self) -> None:
        self.compiles = True
        self.preference: _Preference | None = None
        self._num_without_compiling = 0
        self._preferences: list[_Preference] = []
        self._lock = threading.Lock()

    def count_without_compiling(self, change: int) -> None:
        with self._lock:
            self._num_without_compiling += change
            self.compiles = self._num_without_compiling == 0

    def add(self, preference: _Preference) -> None:
        with self._lock:
            self._preferences.append(preference)
            self.preference = preference

    def remove(self, preference: _Preference) -> None:
        with self._lock:
            self._preferences.remove(preference)
            self.preference = self._preferences[-1] if self._preferences else None


ranking = _Ranking()


def __getattr__(name: str) -> Backend | None:
    if name == "backend":
        return _backend.get()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def use(backend: Backend | None) -> Iterator[None]:
    """Makes fused operations called by this thread or asyncio task take ``backend`` where they can.

    An operation that has no such path, or whose operand it cannot take, uses its default; ``explain()`` shows which.
    The backward of an operation follows its forward, in whatever thread it runs. None restores the defaults.
    torch.compile respects ``use`` around the traced function, not inside it.

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


@contextmanager
def without_compiling() -> Iterator[None]:
    """Keeps fused operations of this process from taking ``compile`` by default, so that nothing waits for a compiler.

    For runs too short to repay compilation. ``use``, ``prefer`` and an explicit ``backend`` take precedence. Enter it
    outside the function that torch.compile traces.
    """
    ranking.count_without_compiling(1)
    try:
        yield
    finally:
        ranking.count_without_compiling(-1)


@contextmanager
def prefer(*backends: Backend) -> Iterator[set[tuple[str, Backend]]]:
    """Makes fused operations of this process take ``backends`` first, regardless of the size and dtype of tensors.

    Each takes the first of ``backends`` that can run, else the first of its defaults. Yields a set that collects pairs
    of operation name and path taken. An explicit ``backend`` or ``use`` takes precedence. Enter it outside the function
    that torch.compile traces.
    """
    preference = _Preference(backends)
    ranking.add(preference)
    try:
        yield preference.taken
    finally:
        ranking.remove(preference)
