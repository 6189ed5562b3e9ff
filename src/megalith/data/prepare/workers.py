"""Worker processes that encode the parts of a job; they exit when their parent does, even if it is killed."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

from megalith.data.prepare.parts import Encoding, Part, encode_part, is_encoded
from megalith.errors import MegalithError

__all__ = ["encode_parts"]


def encode_parts(
    encoding: Encoding, parts: Sequence[Part], processes: int, progress: Callable[[int, int], None]
) -> None:
    """Encodes the parts that are not encoded yet; calls ``progress`` with bytes done and total bytes after each.

    Raises:
        DataError: a source is invalid.
        StorageError: the disk is full or not writable.
        MegalithError: a process was killed.
    """
    pending = [number for number in range(len(parts)) if not is_encoded(encoding.folder, number)]
    total = sum(part.num_bytes for part in parts)
    done = total - sum(parts[number].num_bytes for number in pending)
    progress(done, total)
    processes = min(processes, len(pending))
    if processes > 1:
        finished = _encode_in_processes(encoding, parts, pending, processes)
    else:
        finished = (encode_part(encoding, number, parts[number]) for number in pending)
    for number in finished:
        done += parts[number].num_bytes
        progress(done, total)


def _encode_in_processes(
    encoding: Encoding, parts: Sequence[Part], pending: Sequence[int], processes: int
) -> Iterator[int]:
    """Yields the number of each part when it is finished."""
    # not fork: a copy of this process could inherit a lock that a thread of tokenizers holds
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_begin) as executor:
        try:
            futures = [executor.submit(encode_part, encoding, number, parts[number]) for number in pending]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise MegalithError(
                f"one of {processes} worker processes that encode text was killed, probably out of memory; run the "
                "same command with fewer --processes to resume"
            ) from error
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _begin() -> None:
    """Initializes a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all cores
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback; parts are written atomically
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exits when the parent dies; otherwise the workers would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"
    connection.wait([parent.sentinel])
    os._exit(1)
