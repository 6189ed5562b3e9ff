"""Where the time of a run goes, by named spans that nest."""

from collections.abc import Callable, Iterator
from time import perf_counter
from types import TracebackType

__all__ = ["Span", "Timers"]


class Span:
    """One named stretch of code, entered with ``with``; made by ``Timers``."""

    __slots__ = ("_parent", "_started", "_timers", "children", "count", "path", "seconds")

    def __init__(self, timers: "Timers", parent: "Span | None", path: str) -> None:
        self._timers = timers
        self._parent = parent
        self._started = 0.0
        self.path = path
        self.seconds = 0.0
        self.count = 0
        self.children: dict[str, Span] = {}

    def __enter__(self) -> "Span":
        timers = self._timers
        timers.innermost = self
        if timers.synchronize is not None:
            timers.synchronize()
        self._started = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        timers = self._timers
        # after an error the device may be beyond waiting for, and a second error would hide the first
        if timers.synchronize is not None and kind is None:
            timers.synchronize()
        self.seconds += perf_counter() - self._started
        self.count += 1
        assert self._parent is not None, "the root is never entered"
        timers.innermost = self._parent


class Timers:
    """Seconds by span: ``with timers("forward-backward"):``.

    A span opened inside another has a path (``optimizer/clip``), and its seconds are part of those of the one around
    it. An entry costs about half a microsecond. One object serves one thread.

    Args:
        synchronize: called at both ends of every span, to wait for a device that works on its own
            (``torch.cuda.synchronize``). Without it, spans on such a device measure the launching only.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.synchronize = synchronize
        self._root = Span(self, None, "")
        self.innermost = self._root  # the span that is open now

    def __call__(self, name: str) -> Span:
        """The span ``name`` within the one that is open now; enter it at once."""
        children = self.innermost.children
        span = children.get(name)
        return span if span is not None else self._new_span(name)

    def totals(self) -> dict[str, float]:
        """Seconds by path since the last reset, spans before their parts; those never left have none."""
        return {span.path: span.seconds for span in _within(self._root) if span.count}

    def reset(self) -> None:
        """Begin the totals again at zero. A span that is open keeps its start."""
        for span in _within(self._root):
            span.seconds, span.count = 0.0, 0

    def _new_span(self, name: str) -> Span:
        assert "/" not in name, f"'/' parts the names of a path, so {name!r} cannot be one name"
        around = self.innermost
        span = Span(self, around, f"{around.path}/{name}" if around.path else name)
        around.children[name] = span
        return span


def _within(span: Span) -> Iterator[Span]:
    for child in span.children.values():
        yield child
        yield from _within(child)
