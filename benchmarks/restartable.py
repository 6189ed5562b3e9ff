"""Items of work in a process of their own, which is started again behind an item that ends it; a line from each.

A kernel that fails on a GPU spoils all that its process does later, and one that hangs never comes back. So nothing is
done in the process that writes the results, and a process in which anything has failed does nothing more.

    python -m benchmarks.restartable MODULE:FUNCTION ARGUMENTS    one item, for compute-sanitizer and its kin
"""

import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

__all__ = ["Item", "Job", "Line", "lines_of"]

Line = dict[str, Any]
Job = Callable[..., Line]
_IMPORTED = [
    "torch",
    "torch._dynamo",  # eight seconds, which the first item of every process would wait for
    "benchmarks.fusions.registry",
    "tests.fusions.harness",
]  # before a process is forked, once for all
_TO_START = 120.0  # seconds that a process may take to start, which no item is charged with
_TO_END = 10.0  # seconds that a process may take to clear up, after its last item


class Item(NamedTuple):
    """A name for readers, and the arguments of the job, which JSON can hold."""

    name: str
    arguments: tuple[Any, ...]


def lines_of(job: Job, items: Iterable[Item], limit: float, deadline: float) -> Iterator[Line]:
    """What ``job`` says of each item, with its name as ``item``; with the reason as ``failure`` where it says nothing.

    Args:
        job: a function of a module, of an item's arguments.
        limit: seconds for one item.
        deadline: by ``time.monotonic()``; what has not ended then is ended, and what has not begun is not.
    """
    left = list(items)
    while left and time.monotonic() < deadline:
        num_done = 0
        for line in _one_process(job, left, limit, deadline):
            yield {"item": left[num_done].name, **line}
            num_done += 1
        left = left[num_done:]
    for item in left:
        yield {"item": item.name, "failure": "not run: no time was left"}


def _one_process(job: Job, items: list[Item], limit: float, deadline: float) -> Iterator[Line]:
    """Lines of the first of ``items``, up to one that fails, or all; of one at least."""
    context = multiprocessing.get_context("forkserver")  # never forked from a process that has touched a GPU
    context.set_forkserver_preload(_IMPORTED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, job, [item.arguments for item in items]))
    process.start()
    sender.close()
    try:
        _next_line(receiver, process, min(_TO_START, deadline - time.monotonic()))
        for _ in items:
            line = _next_line(receiver, process, min(limit, deadline - time.monotonic()))
            broken = line.pop("broken", True)
            yield line
            if broken:
                return
        process.join(_TO_END)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _next_line(receiver: Connection, process: Any, seconds: float) -> Line:
    try:
        if receiver.poll(max(0.0, seconds)):
            line: Line = receiver.recv()
            return line
    except EOFError:
        process.join()
        return {"failure": f"its process ended with code {process.exitcode}"}
    return {"failure": f"not done within {seconds:.0f} s"}


def _work(sender: Connection, job: Job, items: list[tuple[Any, ...]]) -> None:
    sender.send({})
    for arguments in items:
        line = _line(job, arguments)
        sender.send(line)
        if line["broken"]:
            return


def _line(job: Job, arguments: tuple[Any, ...]) -> Line:
    """What the job says; ``broken`` where it or the device failed, of which the job may have heard nothing."""
    try:
        line = job(*arguments)
    except Exception as error:
        return {"broken": True, "failure": f"{type(error).__name__}: {error}"[:600]}
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return {**line, "broken": True, "device": str(error).splitlines()[0]}
    return {**line, "broken": False}


def main() -> None:
    """One item, in this process: its line is printed."""
    module, _, function = sys.argv[1].partition(":")
    line = _line(getattr(importlib.import_module(module), function), json.loads(sys.argv[2]))
    print(json.dumps(line))
    sys.exit(line["broken"])


if __name__ == "__main__":
    main()
