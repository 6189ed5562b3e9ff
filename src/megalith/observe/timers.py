"""Where the time of a run goes, by named spans that nest, without making a device wait."""

from collections.abc import Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Clock", "HostClock", "Span", "Timers"]


class Clock(Protocol):
    """Marks instants, and says how far apart two of them are."""

    def mark(self) -> Any:
        """This instant, in what runs on the device now."""

    def seconds(self, start: Any, end: Any) -> float | None:
        """The time between two marks; None as long as the device has not come to the second."""


class HostClock:
    """The time of this process, for a CPU."""

    def mark(self) -> float:
        """Seconds of a clock that never goes back."""
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class Span:
    """One named stretch of code, entered with ``with``; made by ``Timers``."""

    __slots__ = ("_interruptions", "_open", "_parent", "_started", "_timers", "children", "count", "path", "seconds")

    def __init__(self, timers: "Timers", parent: "Span | None", path: str) -> None:
        self._timers = timers
        self._parent = parent
        self._started: Any = None
        self._open: list[tuple[Any, Any]] = []  # pairs of marks that the device has not passed yet
        self._interruptions: list[tuple[Any, Any]] = []  # the same, of time that is counted elsewhere
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
        """Adds up what the device has passed by now."""
        passed, self._open = self._passed(self._open)
        interrupted, self._interruptions = self._passed(self._interruptions)
        self.seconds += passed - interrupted

    def reset(self) -> None:
        """Begins at zero again; marks that the device has not passed are forgotten."""
        self._open, self._interruptions, self.seconds, self.count = [], [], 0.0, 0

    def _passed(self, pairs: list[tuple[Any, Any]]) -> tuple[float, list[tuple[Any, Any]]]:
        """The seconds between the marks of ``pairs``, and the pairs that the device has not passed yet."""
        total, waiting = 0.0, []
        for marks in pairs:
            seconds = self._timers.clock.seconds(*marks)
            if seconds is None:
                waiting.append(marks)
            else:
                total += seconds
        return total, waiting


class _Interruption(Span):
    """A span at the top that interrupts the spans that are open: its seconds are not part of theirs."""

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

    A span opened inside another has a path (``optimizer/clip``), and its seconds are part of those of the one around
    it. An entry costs about half a microsecond on a CPU. One object serves one thread.

    On a GPU a span is what its stream did between two events, and it is counted once the stream has passed the second:
    of a step that is still running the last spans are counted with the next.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = HostClock() if clock is None else clock
        self._root = Span(self, None, "")
        self.innermost = self._root  # the span that is open now

    def __call__(self, name: str) -> Span:
        """The span ``name`` within the one that is open now; enter it at once."""
        children = self.innermost.children
        span = children.get(name)
        return span if span is not None else self._new_span(name)

    def interrupt(self, name: str) -> Span:
        """The span ``name`` at the top, whose seconds are not counted in the spans that are open now."""
        span = self._root.children.get(name)
        if span is None:
            span = self._root.children[name] = _Interruption(self, self._root, name)
        assert isinstance(span, _Interruption), f"{name!r} is the name of a span that does not interrupt"
        return span

    def totals(self) -> dict[str, float]:
        """Seconds by path since the last reset, spans before their parts; those never left have none."""
        for span in _within(self._root):
            span.settle()
        return {span.path: span.seconds for span in _within(self._root) if span.count}

    def reset(self) -> None:
        """Begin the totals again at zero. A span that is open keeps its start."""
        for span in _within(self._root):
            span.reset()

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
