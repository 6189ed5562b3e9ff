"""Which paths operations should take: ``use`` says it for its thread or asyncio task, others for a whole process.

``preference.backend`` reads what ``use`` says: torch.compile guards an attribute of a module, and cannot trace a
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
    """The paths that one ``prefer`` names, and which operation has taken which path since."""

    def __init__(self, backends: tuple[Backend, ...]) -> None:
        self.backends = backends
        self.taken = set[tuple[str, Backend]]()


class _Ranking:
    """What ``prefer`` and ``without_compiling`` have set; blocks of several threads may end in any order.

    Attributes:
        compiles: whether no block of ``without_compiling`` is entered.
        preference: that of the block of ``prefer`` that was entered last.
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


@contextmanager
def without_compiling() -> Iterator[None]:
    """Inside, no fused operation of this process takes ``compile`` by default: nobody waits for a compiler.

    For what is too short to repay it. ``use``, ``prefer`` and an explicit ``backend`` still decide first. It is entered
    outside of what torch.compile traces.
    """
    ranking.count_without_compiling(1)
    try:
        yield
    finally:
        ranking.count_without_compiling(-1)


@contextmanager
def prefer(*backends: Backend) -> Iterator[set[tuple[str, Backend]]]:
    """Fused operations of this process choose, inside, without regard to the size and the dtype of their tensors.

    Each takes the first of ``backends`` that it can, then the first of its defaults. Gives the pairs of an
    operation's name and the path that it has taken. An explicit ``backend``, or ``use``, still decides first. It is
    entered outside of what torch.compile traces.
    """
    preference = _Preference(backends)
    ranking.add(preference)
    try:
        yield preference.taken
    finally:
        ranking.remove(preference)
