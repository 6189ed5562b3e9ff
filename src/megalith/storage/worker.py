"""A thread for work that runs beside the caller's: hashing and flushing of what is being written."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

__all__ = ["Worker"]


class Worker:
    """Inside the ``with`` block, runs functions in a thread, one after another; the block waits for all of them.

    Not a concurrent.futures executor, which takes no work once the main thread has ended, when a checkpoint may still
    be written. The thread is started when there is work. If it cannot be started, functions run in the caller's thread:
    Python 3.12 starts none once the main thread has ended.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._num_open = 0

    def submit(self, function: Callable[[], object]) -> None:
        """Runs ``function`` soon; its result is dropped, its error raised by ``wait`` or ``is_idle``."""
        if self._thread is None:
            self._thread = self._started()
        self._num_open += 1
        if self._thread is None:
            self._call(function)
        else:
            self._work.put(function)

    def is_idle(self) -> bool:
        """Returns whether all functions have ended. Raises the first error among them."""
        while self._num_open and not self._done.empty():
            self._take()
        return not self._num_open

    def wait(self) -> None:
        """Returns once all functions have ended. Raises the first error among them."""
        while self._num_open:
            self._take()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
        if kind is None:
            self.wait()

    def _take(self) -> None:
        self._num_open -= 1
        if (error := self._done.get()) is not None:
            raise error

    def _started(self) -> Thread | None:
        thread = Thread(target=self._run, name="storage worker", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread

    def _run(self) -> None:
        while (function := self._work.get()) is not None:
            self._call(function)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # raised in the thread that waits
            self._done.put(error)
        else:
            self._done.put(None)
