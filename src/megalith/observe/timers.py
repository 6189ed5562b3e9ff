"""Measures where a run spends its time, by named and nested spans, without synchronizing the device."""

from collections.abc import Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Clock", "HostClock", "Span", "Timers"]


class Clock(Protocol):
    """Records marks, and measures the time between two of them."""

    def mark(self) -> Any:
        """Marks the current point in the device's work."""

    def seconds(self, start: Any, end: Any) -> float | None:
        """The time between two marks; None until the device has reached the second."""


class HostClock:
    """Host time, for runs on the CPU."""

    def mark(self) -> float:
        """Seconds of a monotonic clock."""
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class Span:
    """A named section of code, entered with ``with``; created by ``Timers``."""

    __slots__ = ("_interruptions", "_open", "_parent", "_started", "_timers", "children", "count", "path", "seconds")

    def __init__(self, timers: "Timers", parent: "Span | None", path: str) -> None:
        self._timers = timers
        self._parent = parent
        self._started: Any = None
        self._open: list[tuple[Any, Any]] = []  # pairs of marks that the device has not reached yet
        self._interruptions: list[tuple[Any, Any]] = []  # the same, for time that counts elsewhere
        self.path = path
        self.seconds = 0.0
        self.count = 0
        self.children: dict[str, Span] = {}

    def __enter__(self) -> "Span":
        self._timers.innermost = self
        self._started = self._timers.clock.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.append((self._started, self._timers.clock.mark()))
        self.count += 1
        assert self._parent is not None, "the root is never entered"
        self._timers.innermost = self._parent

    def settle(self) -> None:
        """Adds the time of marks that the device has reached."""
        passed, self._open = self._passed(self._open)
        interrupted, self._interruptions = self._passed(self._interruptions)
        self.seconds += passed - interrupted

    def _passed(self, pairs: list[tuple[Any, Any]]) -> tuple[float, list[tuple[Any, Any]]]:
        """The seconds between the marks of ``pairs``, and the pairs that the device has not reached yet."""
        total, waiting = 0.0, []
        for marks in pairs:
            seconds = self._timers.clock.seconds(*marks)
            if seconds is None:
                waiting.append(marks)
            else:
                total += seconds
        return total, waiting


class _Interruption(Span):
    """A top-level span that interrupts the open spans: its seconds are excluded from theirs."""

    __slots__ = ("_interrupted",)

    def __enter__(self) -> Span:
        self._interrupted = self._timers.innermost
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._timers.innermost = around = self._interrupted
        while around._parent is not None:
            around._interruptions.append(self._open[-1])
            around = around._parent


class Timers:
    """Seconds by span: ``with timers("forward-backward"):``.

    A span opened inside another has a path (``optimizer/clip``), and its seconds are included in the outer span.
    Entering a span costs about half a microsecond on a CPU. Not thread-safe.

    On a GPU a span is the time between two events in the stream, and it is counted once the stream has reached the
    second. The last spans of a step that is still running are therefore counted with the next step.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = HostClock() if clock is None else clock
        self._root = Span(self, None, "")
        self.innermost = self._root  # the span that is open now

    def __call__(self, name: str) -> Span:
        """The span ``name`` inside the current span; enter it immediately."""
        children = self.innermost.children
        span = children.get(name)
        return span if span is not None else self._new_span(name)

    def interrupt(self, name: str) -> Span:
        """The top-level span ``name``, whose seconds are excluded from the spans that are open when it is entered."""
        span = self._root.children.get(name)
        if span is None:
            span = self._root.children[name] = _Interruption(self, self._root, name)
        assert isinstance(span, _Interruption), f"span {name!r} already exists and does not interrupt"
        return span

    def totals(self) -> dict[str, float]:
        """Seconds by path, outer spans first; spans that never ended are omitted."""
        for span in _within(self._root):
            span.settle()
        return {span.path: span.seconds for span in _within(self._root) if span.count}

    def _new_span(self, name: str) -> Span:
        assert "/" not in name, f"'/' separates the names in a path, so a span cannot be named {name!r}"
        around = self.innermost
        span = Span(self, around, f"{around.path}/{name}" if around.path else name)
        around.children[name] = span
        return span


def _within(span: Span) -> Iterator[Span]:
    for child in span.children.values():
        yield child
        yield from _within(child)
